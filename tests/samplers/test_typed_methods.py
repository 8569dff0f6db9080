"""Every method over a typed graph: the contract of a block, one road for one seed, and unbiased sums per relation."""

from __future__ import annotations

import pytest
import torch

from adahop import Graph, InputError, make, ops
from adahop.methods import METHODS
from conftest import same_blocks

from test_conformance import FAMILIES, check_blocks, numbers  # isort: skip
from test_rows import typed  # isort: skip

SEEDS = torch.tensor([0, 5, 9, 14, 20, 33, 10])
TYPED = [name for name, m in METHODS.items() if m.family != "subgraph"]
every_method = pytest.mark.parametrize("name", TYPED)


def build(name: str, graph: Graph, seed: int = 0, sizes=None, **options):
    if "features" in METHODS[name].needs:
        options["features"] = torch.randn(graph.num_nodes, 4, generator=torch.Generator().manual_seed(0))
    return make(name, graph, sizes or FAMILIES[METHODS[name].family], seed=seed, **options)


def travel(sampler, steps: int, start: int = 0):
    out = []
    for t in range(start, start + steps):
        blocks = sampler.sample((SEEDS + t) % 42)
        sampler.update(blocks, numbers(blocks, t))
        out.append(blocks)
    return out


def check_typed(blocks, graph: Graph) -> None:
    """The rows of a block are those of its targets, and its edges lie in them."""
    for b in blocks:
        assert torch.equal(b.relation, graph.types.relation[b.row]) and int(b.row_ptr[-1]) == b.num_edges
        row = b.row.repeat_interleave(b.row_ptr.diff())
        assert bool(((b.pos >= graph.indptr[row]) & (b.pos < graph.last[row])).all())
        assert torch.equal(graph.dst()[b.pos], b.n_id[b.dst])


@every_method
def test_blocks(name):
    for graph in (typed(), typed(3), typed().normalized("row", self_loops=False)):
        sampler = build(name, graph)
        for t, blocks in enumerate(travel(sampler, 3)):
            check_blocks(blocks, graph, (SEEDS + t) % 42, family=METHODS[name].family)
            check_typed(blocks, graph)
        for seeds in ([10, 40], [], [3, 3, 20, 3]):
            blocks = sampler.sample(seeds)
            check_blocks(blocks, graph, torch.tensor(seeds, dtype=torch.long), family=METHODS[name].family)
            sampler.update(blocks, numbers(blocks, 0))


@every_method
def test_a_graph_whose_relations_are_empty(name):
    none = torch.zeros(2, 0, dtype=torch.long)
    graph = Graph.from_relations({"a": 3, "b": 2}, {("a", "to", "b"): none, ("b", "in", "b"): none})
    sampler = build(name, graph)
    blocks = sampler.sample({"b": [1], "a": [2, 0]})
    assert blocks[-1].n_id.tolist() == [4, 2, 0] and all(b.num_edges == 0 for b in blocks)
    sampler.update(blocks, numbers(blocks, 0))
    assert graph.types.batch(blocks).edge_index["a", "to", "b"].shape == (2, 0)


@every_method
def test_no_limit_means_everyone(name):
    graph = typed()
    for block in build(name, graph, sizes=[-1, -1]).sample(torch.arange(42)):
        assert torch.equal(block.pos.sort().values, torch.arange(600)) and bool((block.prob == 1).all())


@every_method
def test_one_seed_one_road_for_any_number_of_threads(name, many_threads):
    roads = []
    for n in (1, 2, 8):
        with ops.threads(n):
            sampler = build(name, typed(), seed=3)
            roads.append((travel(sampler, 4), sampler.state_dict()))
    for road, state in roads[1:]:
        assert all(same_blocks(a, b) for a, b in zip(roads[0][0], road, strict=True))
        assert all(torch.equal(state[k], roads[0][1][k]) for k in state)
    other = travel(build(name, typed(), seed=4), 4)
    assert not all(same_blocks(a, b) for a, b in zip(roads[0][0], other, strict=True))


@every_method
def test_state_goes_on_where_it_was(name):
    graph = typed()
    one, two = build(name, graph, seed=4), build(name, graph, seed=4)
    travel(one, 5)
    two.load_state_dict(one.state_dict())
    assert all(same_blocks(a, b) for a, b in zip(travel(one, 3, 5), travel(two, 3, 5), strict=True))


def test_subgraph_methods_refuse_in_a_sentence():
    for name in set(METHODS) - set(TYPED):
        with pytest.raises(InputError, match="`graph` must have one relation for a subgraph method, got 5"):
            build(name, typed())


def test_state_is_per_edge_row_and_pair():
    """Bytes per layer: bandits 4 per edge and 8 or 12 per (relation, target), norms 6 per (relation, source)."""
    g = typed()
    pairs, rows = g.num_sources, g.num_rows
    assert rows < 5 * g.num_nodes and pairs == 30 + 30 + 12 + 12 + 30
    for policy, wanted in (("exp3", 4 * 600 + 8 * rows), ("thanos", 4 * 600 + 12 * rows), ("tracked", 6 * pairs)):
        own = make("graphsage", g, [2, 2], policy=policy).policy
        names = ("arms.weight", "mean", "size", "visits", "square")
        found = sum(t.nbytes for name, t in own.named_buffers() if name in names)
        assert found == 2 * wanted, policy


SIZED = {"bought": [3], "seen": [-1], "knows": [2], "rates": [4], "like": [0]}
CASES = [
    ("pladies", [12], {}), ("as-gcn", [12], {}), ("ladies", [12], {"draw": "multinomial", "inner": False}),
    ("ladies", {"item": [8], "user": [3]}, {}), ("fastgcn", {"item": [9], "user": [4]}, {"inner": False}),
    ("bliss", {"item": [8], "user": [3]}, {"draw": "poisson"}), ("as-gcn", {"item": [8], "user": [3]}, {}),
    ("graphsage", SIZED, {}), ("s-gcn", SIZED, {}), ("bs", SIZED, {}), ("bs.m", SIZED, {}), ("adahop", SIZED, {}),
    ("graphsage", SIZED, {"policy": "static", "draw": "systematic"}), ("adahop", SIZED, {"draw": "poisson"}),
    ("adahop", SIZED, {"draw": "multinomial"}), ("labor", SIZED, {}), ("labor", SIZED, {"refine": 0}),
    ("graphsage", {"item": [20], "user": [25]}, {"budget": True}),
    ("adahop", {"bought": [15], "rates": [30], "default": [14]}, {"budget": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes", "options"), CASES)
def test_sums_per_relation_are_unbiased(name, sizes, options):
    """Beside the cases of test_rows: sizes by relation and by type. About 30 sums per case of which some 25 are random;
    z below 5: a false alarm in 60,000 per case. A relation of size 0 has no sum."""
    g = typed(7)
    sampler = build(name, g, 1, sizes, **options)
    gen = torch.Generator().manual_seed(2)
    for _ in range(5):
        blocks = sampler.sample(SEEDS)
        sampler.update(blocks, [torch.rand(b.num_edges, generator=gen) * b.scale.square() for b in blocks])
    h = torch.rand(42, generator=gen).double()
    kind, dst = g.types.relation[g.row()], g.dst()
    slot = torch.full((42,), -1)
    slot[SEEDS] = torch.arange(7)
    only = sampler.sized.drawn(0, g.types)
    mine = (slot[dst] >= 0) & (True if only is None else only[kind])
    each = g.weight.double() * h[g.indices.long()]
    full = ops.segment_sum(each[mine], slot[dst[mine]] * 5 + kind[mine], 35)
    total, square, steps = torch.zeros(35).double(), torch.zeros(35).double(), 150 if sampler.budget else 500
    for _ in range(steps):
        (block,) = sampler.sample(SEEDS)
        message = block.weight.double() * block.scale.double() * h[block.n_id[block.src]]
        which = block.relation.repeat_interleave(block.row_ptr.diff())
        found = ops.segment_sum(message, block.dst * 5 + which, 35) - full
        total, square = total + found, square + found.square()
    spread = (square / steps - (total / steps).square()).clamp(min=0.0).sqrt()
    assert bool(((total / steps).abs() <= 5 * spread / steps**0.5 + 1e-6).all())
    assert float(spread.max()) > 0
