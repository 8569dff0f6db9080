"""Padded blocks of typed graphs: the draws of compact ones, slot by slot, in a shape that chance does not change."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import adahop
from adahop.graph import Graph
from adahop.samplers.loop import Padded, TypedPadded
from adahop.samplers.slots import TypedHops

from typed_graphs import RELATIONS, typed_data  # isort: skip

SEEDS = torch.tensor([3, 17, 38, 0, 20])


def looped() -> Graph:
    """Self-loops in a relation from a type to itself, and a relation without edges; "tag" has no in-edges."""
    g = torch.Generator().manual_seed(4)
    cites = torch.randint(12, (2, 80), generator=g)
    return Graph.from_relations(
        {"paper": 12, "author": 9, "tag": 5},
        {
            ("paper", "cites", "paper"): torch.cat([cites, torch.arange(0, 12, 2).repeat(2, 1)], 1),
            ("author", "writes", "paper"): torch.stack([torch.randint(9, (60,), generator=g), cites[0, :60]]),
            ("paper", "by", "author"): torch.stack([cites[1, :50], torch.randint(9, (50,), generator=g)]),
            ("tag", "on", "paper"): torch.zeros(2, 0, dtype=torch.long),
        },
    )


def graph() -> Graph:
    return typed_data().graph.normalized("row", False)


def made(g: Graph, sizes: list[int], seeds: torch.Tensor = SEEDS, **options):
    sampler = adahop.make("graphsage", g, sizes, seed=2, **options)
    numbering = Padded.fitted(sampler, seeds=seeds)
    assert isinstance(numbering, TypedPadded), numbering
    return sampler, numbering


def drawn(block) -> dict[tuple[int, int], Counter]:
    """What each (target, relation) drew: source, edge, weight and scale. Copies of a target must agree."""
    relation = block.relation.repeat_interleave(block.row_ptr.diff())
    each: dict[tuple[int, int], Counter] = {}
    for e in (block.scale > 0).nonzero().flatten().tolist():
        what = (int(block.n_id[block.src[e]]), int(block.e_id[e]), float(block.weight[e]), float(block.scale[e]))
        each.setdefault((int(block.dst[e]), int(relation[e])), Counter())[what] += 1
    found: dict[tuple[int, int], Counter] = {}
    for (place, r), what in each.items():
        assert found.setdefault((int(block.targets[place]), r), what) == what
    return found


@pytest.mark.parametrize("draw", ["multinomial", "systematic"])
@pytest.mark.parametrize("make", [graph, looped])
def test_slots_hold_what_a_compact_block_holds(make, draw):
    g, seeds = make(), SEEDS % 12
    sampler, numbering = made(g, [3, 4], seeds, draw=draw)
    compact = sampler.sample(seeds)
    sampler.step.zero_()
    padded = sampler.sample(seeds, numbering)
    assert torch.equal(padded[1].targets, seeds) and torch.equal(padded[0].targets, padded[1].n_id)
    assert drawn(compact[1]) == drawn(padded[1])
    met = set(compact[0].targets.tolist())
    assert met <= set(padded[0].targets.tolist())  # there, nodes of empty slots draw, too
    assert drawn(compact[0]) == {key: what for key, what in drawn(padded[0]).items() if key[0] in met}


def test_a_slot_s_relation_and_types_are_known_beforehand():
    g = looped()
    _, numbering = made(g, [2, 2, 2], torch.arange(12))
    sampler = adahop.make("graphsage", g, [2, 2, 2], seed=1)
    blocks = sampler.sample(torch.arange(0, 12, 2), numbering)
    bounds = g.types.bounds
    for block in blocks:
        layout = block.layout
        for spans, nodes in ((layout.targets, block.targets), (layout.sources, block.n_id)):
            assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])] and spans[-1].stop == nodes.numel()
            for kind, start, stop in spans:
                some = nodes[start:stop]
                assert bool(((some >= bounds[kind]) & (some < bounds[kind + 1])).all())
        relation = block.relation.repeat_interleave(block.slots)
        kind = g.types.type_of(block.n_id)
        source = torch.tensor([s for s, _ in g.types.ends])[relation]
        target = torch.tensor([t for _, t in g.types.ends])[relation]
        loop = (torch.arange(block.num_edges) % block.slots) < numbering.loops
        assert torch.equal(kind[block.src][~loop], source[~loop]) and torch.equal(kind[block.dst], target)
        assert bool((block.scale[loop & (source != target)] == 0).all())
        used = block.scale > 0
        assert torch.equal(g.row()[block.pos][used], block.row.repeat_interleave(block.slots)[used])
        assert torch.equal(block.edge_index[:, used][0], block.layout.rows[0][used])
        rows = block.by_row()
        assert torch.equal(rows.ptr, torch.arange(rows.num_dst + 1) * block.slots)
        assert torch.equal(rows.dst, torch.arange(rows.num_dst).repeat_interleave(block.slots))


def test_rows_of_targets_without_edges_are_none():
    g = graph()
    _, numbering = made(g, [2])
    hops = TypedHops(g, 0)
    for kind, table in enumerate(hops.row_of):
        low, high = g.types.bounds[kind : kind + 2]
        want = {}
        for node in range(low, high):
            for row in range(int(g.types.ptr[node]), int(g.types.ptr[node + 1])):
                want[node - low, int(g.types.relation[row])] = row
        got = {(i, r): int(table[i, c]) for c, r in enumerate(hops.into[kind]) for i in range(high - low)}
        assert {key: row for key, row in got.items() if row >= 0} == want
        assert set(got.values()) - set(want.values()) <= {-1}
    lone = torch.tensor([39, 38])  # nothing points to the last papers
    sampler = adahop.make("graphsage", g, [2])
    (block,) = sampler.sample(lone, numbering)
    assert bool((block.row == -1).all()) and bool((block.scale == 0).all()) and bool((block.weight == 0).all())


def test_shapes_do_not_depend_on_chance():
    g = graph()
    sampler, numbering = made(g, [3, 2])
    one, other = (sampler.sample(torch.arange(6) * step, numbering) for step in (3, 7))
    fixed = ("edge_index", "ptr", "row_ptr", "relation")
    for a, b in zip(one, other, strict=True):
        assert [getattr(t, "shape", t) for t in a[:10]] == [getattr(t, "shape", t) for t in b[:10]]
        assert all(getattr(a, name) is getattr(b, name) for name in fixed) and a.layout is b.layout
        assert not torch.equal(a.pos, b.pos)
    per_paper = sum(t == "paper" for _, _, t in RELATIONS)
    assert (
        one[1].num_edges == 6 * per_paper * (numbering.loops + 2) == 6 * numbering.hops.slots(0, [3, 2], frozenset([0]))
    )
    assert one[0].num_edges + one[1].num_edges == 6 * numbering.hops.slots(0, [3, 2], frozenset())


@pytest.mark.parametrize(
    ("method", "options"), [("graphsage", {}), ("bs", {}), ("adahop", {}), ("bs", {"draw": "depround"})]
)
def test_sums_of_every_relation_are_unbiased(method, options):
    """The mean of 300 draws of two neighbours against the sum over all, per target and relation.

    40 targets x 5 relations in 4 cases = 800 z-scores; |z| > 5 has a family-wise error rate of 5e-4 for normal means.
    """
    g, seeds = graph(), torch.arange(40)
    x = torch.rand(g.num_nodes, generator=torch.Generator().manual_seed(1)) + 0.1
    sampler = adahop.make(method, g, [2], seed=7, **options)
    if method != "graphsage":  # odds that differ
        state = sampler.policy.state_dict()
        for name, t in state.items():
            if name in ("arms.weight", "square"):
                t.copy_(torch.rand(t.shape, generator=torch.Generator().manual_seed(2)) + 0.2)
        sampler.policy.load_state_dict(state)
    numbering = Padded.fitted(sampler, seeds=seeds)
    found = []
    for _ in range(300):
        (block,) = sampler.sample(seeds, numbering)
        rows = block.by_row()
        message = block.weight * block.scale * x[block.n_id[rows.src]]
        found.append(message.view(rows.num_dst, block.slots).sum(1))
    got = torch.stack(found)
    every = g.in_edges(seeds)
    want = torch.zeros(40, len(RELATIONS))
    relation = every.relation.repeat_interleave(every.row_ptr.diff())
    want.index_put_((every.dst, relation), every.weight * x[every.src], accumulate=True)
    mean, error = got.mean(0), got.std(0) / 300**0.5
    z = (mean - want[block.dst[:: block.slots], block.relation]) / error.clamp(min=1e-6)
    assert z.abs().max() < 5 and float(error.max()) > 1e-3 and block.relation.unique().numel() == 5


def test_what_has_no_fixed_shape_says_why():
    g = graph()

    def why(sampler, seeds=SEEDS):
        found = Padded.fitted(sampler, seeds=seeds)
        return found if isinstance(found, str) else None

    assert "several node types" in why(adahop.make("graphsage", g, [2]), torch.tensor([0, 50]))
    assert "no fixed fan-out" in why(adahop.make("graphsage", g, {"cites": [3], "default": [2]}))
    assert "no fixed fan-out" in why(adahop.make("labor", g, [2]))
    assert "too many slots" in why(adahop.make("graphsage", g, [80, 80]))
    assert "self-loops" in why(adahop.make("thanos", g, [2]))
    assert why(adahop.make("graphsage", g, [2, 2])) is None
    assert "several node types" in why(adahop.make("graphsage", g, [2, 2]), None), "none were told"
