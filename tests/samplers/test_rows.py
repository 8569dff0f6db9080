"""Rows: clipped by time, with room to grow, and one per (relation, target)."""

from __future__ import annotations

import pytest
import torch

from adahop import make, ops
from adahop.block import Seeds
from adahop.checks import InputError
from adahop.features import Schema
from adahop.graph import Graph
from adahop.models.typed import sliced
from adahop.ops import DRAWS, Odds, Rows, random
from adahop.policies import Attended, Tracked
from adahop.samplers import NeighborSampler
from adahop.samplers.loop import Compact, Merged, sample

from conftest import messy_graph  # isort: skip

K = torch.tensor([3])


def some_odds(graph: Graph, form: str) -> Odds:
    g = torch.Generator().manual_seed(1)
    edge, node = torch.rand(graph.num_edges, generator=g), torch.rand(graph.num_nodes, generator=g)
    edge[::6] = 0.0
    return {"uniform": Odds(), "edge": Odds(edge=edge), "both": Odds(edge=edge, node=node, eta=0.1)}[form]


def shortened(graph: Graph, since: torch.Tensor, until: torch.Tensor) -> tuple[Graph, torch.Tensor]:
    """(the graph with those true neighbours alone, the old place of each new one)."""
    place = torch.arange(graph.num_edges)
    row = graph.dst()
    loop = place < graph.first[row]
    kept = (loop | ((place >= since[row]) & (place < until[row]))).nonzero().flatten()
    indptr = ops.pointer(torch.bincount(row[kept], minlength=graph.num_nodes))
    first = indptr[:-1] + (graph.first - graph.indptr[:-1])
    return Graph(indptr, graph.indices[kept], graph.weight[kept], None, first), kept


@pytest.mark.parametrize("form", ["uniform", "edge", "both"])
@pytest.mark.parametrize("how", list(DRAWS))
@pytest.mark.parametrize("reference", [False, True])
def test_a_clipped_row_draws_as_the_shorter_graph_would(how, form, reference, monkeypatch):
    if reference:
        monkeypatch.setenv("ADAHOP_REFERENCE", "1")
    graph = messy_graph().normalized("row")
    nodes, g = torch.arange(graph.num_nodes), torch.Generator().manual_seed(0)
    size = graph.last - graph.first
    since = graph.first + (torch.rand(60, generator=g) * 0.4 * size).long()
    until = since + (torch.rand(60, generator=g) * (graph.last - since + 1)).long()
    until[3] = since[3]  # nothing is left of the hub
    short, kept = shortened(graph, since, until)
    odds = some_odds(graph, form)
    cut = odds._replace(edge=None if odds.edge is None else odds.edge[kept])
    ours = ops.draw(graph.edges, Rows(nodes, since=since, until=until), K, how, odds, random.key(7))
    want = ops.draw(short.edges, Rows(nodes), K, how, cut, random.key(7))
    assert torch.equal(ours.ptr, want.ptr) and torch.equal(ours.pos, kept[want.pos])
    assert torch.equal(ours.prob, want.prob) and torch.equal(ours.scale, want.scale)
    assert 0 < int(ours.ptr[-1]) < graph.num_edges


def test_labor_and_layer_wise_scans_are_clipped_too():
    graph = messy_graph().normalized("row")
    nodes = torch.arange(graph.num_nodes)
    since, until = graph.first, graph.first + (graph.last - graph.first) // 2
    short, kept = shortened(graph, since, until)
    scratch = torch.full((60,), -1, dtype=torch.int32)
    for rows, g in ((Rows(nodes, since=since, until=until), graph), (Rows(nodes), short)):
        near = ops.near(g.edges, rows, nodes[:20], True, scratch)
        found = ops.labor(g.edges, rows, K, 1, 60, 5), near
        if g is graph:
            ours = found
    (a, near), (b, shorter) = ours, found
    assert torch.equal(a.pos, kept[b.pos]) and torch.equal(a.scale, b.scale)
    assert torch.equal(near.place, kept[shorter.place]) and torch.equal(near.nodes, shorter.nodes)


def test_a_policy_with_sums_of_whole_rows_is_exact_on_a_clipped_one():
    """EXP3's trees and the tracked copies are of whole rows; a clipped row is scanned.

    z below 4.5 for 40 rows and two policies: a false alarm in 1,800.
    """
    graph = messy_graph(40, 4000)
    until = graph.first + (graph.last - graph.first) // 3
    value = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(0)).double()
    place = torch.arange(graph.num_edges)
    inside = (place >= graph.first[graph.dst()]) & (place < until[graph.dst()])
    full = ops.segment_sum(value.masked_fill(~inside, 0.0), graph.dst(), 40)
    for policy in ("exp3", "tracked"):
        sampler = make("bs", graph, [4], policy=policy)
        sampler.update(blocks := sampler.sample(range(40)), [torch.rand(b.num_edges) for b in blocks])
        rows, sums = Rows(torch.arange(40), until=until), []
        for seed in range(400):
            d = ops.draw(
                graph.edges, rows, K, "multinomial", sampler.policy.odds_for(0, "multinomial"), random.key(seed)
            )
            true = d.pos >= graph.first[graph.dst()[d.pos]]
            sums.append(ops.segment_sum((d.scale * value[d.pos])[true], graph.dst()[d.pos][true], 40))
        out = torch.stack(sums)
        busy = until - graph.first > 3
        assert bool(((out.mean(0) - full).abs() <= 4.5 * out.std(0) / 20 + 1e-9)[busy].all())


def roomy(graph: Graph, slack: int = 3) -> tuple[Graph, torch.Tensor]:
    """The graph with free places behind every row, and where each old place is."""
    place = torch.arange(graph.num_edges) + slack * graph.dst()
    n, m = graph.num_nodes, graph.num_edges + slack * graph.num_nodes
    indices, weight = torch.full((m,), n - 1, dtype=graph.indices.dtype), torch.full((m,), 1e6)
    eid = torch.full((m,), -1, dtype=torch.int32)
    indices[place], weight[place] = graph.indices, graph.weight
    eid[place] = torch.arange(graph.num_edges, dtype=torch.int32) if graph.eid is None else graph.eid
    at = slack * torch.arange(n + 1)
    return Graph(graph.indptr + at, indices, weight, eid, graph.first + at[:-1], graph.last + at[:-1]), place


@pytest.mark.parametrize("method", ["graphsage", "bs.m", "labor", "ladies", "adahop"])
def test_room_to_grow_changes_no_batch(method):
    graph = messy_graph().normalized("row")
    wide, place = roomy(graph)
    one, other = (make(method, g, [4, 5], seed=3) for g in (graph, wide))
    for _ in range(3):
        for a, b in zip(*(blocks := (one.sample([3, 0, 7]), other.sample([3, 0, 7]))), strict=True):
            assert torch.equal(a.n_id, b.n_id) and torch.equal(a.e_id, b.e_id) and torch.equal(a.scale, b.scale)
            assert torch.equal(place[a.pos], b.pos) and torch.equal(a.weight, b.weight)
        for sampler, drawn in zip((one, other), blocks, strict=True):
            sampler.update(drawn, [(b.n_id[b.src] + 1.0) * b.scale for b in drawn])
    assert torch.equal(wide.degree(), graph.degree())
    h = torch.rand(60, 5)
    nodes = torch.arange(60)
    assert torch.equal(ops.full_sum(h, wide.edges, nodes), ops.full_sum(h, graph.edges, nodes))


# --- time -----------------------------------------------------------------------------------------------------------


def timed() -> Graph:
    """Node 0 hears from 1, 2, 3 and 4 at the times 10, 20, 30, 40; they hear from 5 at 25, and 5 from 1 at 5."""
    g = Graph.from_edge_index([[1, 2, 3, 4, 5, 5, 5, 5, 1], [0, 0, 0, 0, 1, 2, 3, 4, 5]])
    return g.replace(time=torch.tensor([10.0, 20, 30, 40, 25, 25, 25, 25, 5]))


def test_times_find_their_places():
    g = timed()
    rows = g.rows(
        torch.tensor([0, 0, 0, 1]), since=torch.tensor([0.0, 20, 50, 0]), until=torch.tensor([30.0, 99, 99, 25])
    )
    assert rows.since.tolist() == [0, 1, 4, 4] and rows.until.tolist() == [2, 4, 4, 4]
    with pytest.raises(InputError, match="time per edge"):
        messy_graph().rows(torch.tensor([0]), until=torch.tensor([1.0]))


def test_a_seed_sees_only_what_was_before_it():
    g = timed()
    sampler = NeighborSampler(g, [-1, -1])
    merged = Merged(disjoint=True)
    seeds = Seeds(torch.tensor([0, 0, 0]), time=torch.tensor([15.0, 26.0, 26.0]))
    blocks = sample(sampler, seeds, merged)
    ends = merged.n_id[torch.cat(merged.edges, 1)]
    tree = merged.tree[torch.cat(merged.edges, 1)[1]]
    seen = [sorted(map(tuple, ends[:, tree == t].t().tolist())) for t in range(3)]
    assert seen[0] == [(1, 0)]  # 5 spoke to 1 only at 25
    assert seen[1] == seen[2] == [(1, 0), (2, 0), (5, 1), (5, 2)]
    assert len(blocks) == 2
    with pytest.raises(InputError, match="disjoint"):
        sample(sampler, seeds, Compact())


# --- several relations ----------------------------------------------------------------------------------------------


def typed(seed: int = 0) -> Graph:
    """Two types; relations that are parallel, from a type to itself with self-loops and multi-edges, and empty."""
    g = torch.Generator().manual_seed(seed)
    user, item = 12, 30

    def pairs(a: int, b: int, many: int) -> torch.Tensor:
        return torch.stack([torch.randint(a, (many,), generator=g), torch.randint(b - 2, (many,), generator=g)])

    edges = {
        ("item", "bought", "user"): pairs(item, user, 200),
        ("item", "seen", "user"): pairs(item, user, 150),
        ("user", "knows", "user"): pairs(user, user, 90),
        ("user", "rates", "item"): pairs(user, item, 160),
        ("item", "like", "item"): torch.zeros(2, 0, dtype=torch.long),
    }
    weight = {k: torch.rand(v.shape[1], generator=g) + 0.1 for k, v in edges.items()}
    return Graph._typed({"user": user, "item": item}, edges, weight)


def test_rows_are_relation_and_target():
    g = typed()
    assert g.num_nodes == 42 and g.num_edges == 600 and g.num_rows < 4 * 42
    assert g.types.nodes == {"user": 0, "item": 12} and g.types.starts == (0, 200, 350, 440, 600, 600)
    kind = g.types.relation[g.row()]
    eid = g.eid.long()
    assert torch.equal(torch.bucketize(eid, torch.tensor(g.types.starts[1:]), right=True), kind)
    assert int(g.degree().sum()) == 600 and int(g.degree()[[10, 11, 40, 41]].sum()) == 0  # isolated as targets
    src, dst = g.indices.long(), g.dst()
    place = torch.arange(600)
    assert torch.equal(place < g.first[g.row()], src == dst) and bool((src == dst).any())
    state = src + g.types.shift[g.row()]
    assert g.num_sources == 30 + 30 + 12 + 12 + 30 and int(state.min()) >= 0 and int(state.max()) < g.num_sources
    pairs = {(int(k), int(s)) for k, s in zip(kind, src, strict=True)}
    assert len(set(state.tolist())) == len(pairs)  # one entry per relation and source


def test_one_relation_is_the_plain_graph():
    edge_index = messy_graph().edge_index()
    g = Graph._typed({"n": 60}, {("n", "to", "n"): edge_index})
    plain = Graph.from_edge_index(edge_index, num_nodes=60)
    assert torch.equal(g.degree(), plain.degree()) and torch.equal(g.indices, plain.indices)
    a, b = (NeighborSampler(x, [-1, -1]).sample([3, 0, 59]) for x in (g, plain))
    for one, other in zip(a, b, strict=True):
        assert (
            torch.equal(one.n_id, other.n_id) and torch.equal(one.e_id, other.e_id) and torch.equal(one.ptr, other.ptr)
        )


@pytest.mark.parametrize(("method", "options"), [
    ("graphsage", {}), ("graphsage", {"draw": "systematic"}), ("graphsage", {"draw": "poisson"}),
    ("graphsage", {"draw": "depround"}), ("bs", {}), ("bs.m", {}), ("graphsage", {"policy": "static"}),
    ("graphsage", {"policy": "tracked"}), ("graphsage", {"policy": "tracked", "draw": "systematic"}),
    ("graphsage", {"budget": True}), ("labor", {}), ("labor", {"refine": 0}), ("ladies", {}), ("fastgcn", {}),
    ("bliss", {}),
])  # fmt: skip
def test_every_relation_s_sum_is_unbiased(method, options):
    """Per (relation, target), after some learning. About 90 sums each; z below 5: a false alarm in 20,000 per case."""
    g = typed()
    size = 12 if method in ("ladies", "fastgcn", "bliss") else 60 if "budget" in options else 3
    sampler = make(method, g, [size], seed=1, **options)
    seeds = torch.tensor([0, 5, 9, 14, 20, 33, 10])
    gen = torch.Generator().manual_seed(2)
    for _ in range(6):
        blocks = sampler.sample(seeds)
        sampler.update(blocks, [torch.rand(b.num_edges, generator=gen) * b.scale.square() for b in blocks])
    h = torch.rand(42, generator=gen).double()
    kind, dst = g.types.relation[g.row()], g.dst()
    slot = torch.full((42,), -1)
    slot[seeds] = torch.arange(7)
    mine = slot[dst] >= 0
    each = g.weight.double() * h[g.indices.long()]
    full = ops.segment_sum(each[mine], slot[dst[mine]] * 5 + kind[mine], 35)
    found = []
    for _ in range(1500):
        (block,) = sampler.sample(seeds)
        message = block.weight.double() * block.scale.double() * h[block.n_id[block.src]]
        which = block.relation[ops.segment_of(block.row_ptr, block.num_edges)]
        found.append(ops.segment_sum(message, block.dst * 5 + which, 35))
    out = torch.stack(found)
    assert bool(((out.mean(0) - full).abs() <= 5 * out.std(0) / len(found) ** 0.5 + 1e-6).all())
    assert float(out.std(0).max()) > 0


def test_a_block_s_relations_are_its_parts():
    g = typed()
    block = NeighborSampler(g, [2]).sample(range(42))[0]
    parts = [part.block for part in sliced(block, Schema(g.types.num_nodes, {}, g.relations))]
    assert sum(p.num_edges for p in parts) == block.num_edges and parts[4].num_edges == 0
    h = torch.rand(42, 3)
    whole = ops.gather_sum(h[block.n_id], block.src, block.dst, block.weight * block.scale, block.ptr)
    each = torch.zeros(42, 3)
    for p in parts:
        each[p.targets] += ops.gather_sum(h[p.n_id], p.src, p.dst, p.weight * p.scale, p.ptr)
    assert torch.allclose(each[block.targets], whole, atol=1e-5)
    ptr = torch.cat([block.row_ptr[:1], block.ptr[1:]])
    assert torch.equal(ops.pointer(torch.bincount(block.dst, minlength=42)), ptr)
    taken = block.row_ptr.diff()
    want = (g.last - g.first)[block.row].clamp(max=2) + (g.first - g.indptr[:-1])[block.row]
    assert torch.equal(taken, want)  # 2 per relation and target, and the self-loops


def test_state_is_per_relation_and_source():
    """A source whose messages are long in one relation is likely there, and no likelier in the others."""
    g = typed()
    policy = Tracked(g, 1)
    sampler = NeighborSampler(g, [3], policy)
    for _ in range(60):
        (block,) = sampler.sample(range(42))
        which = block.relation[ops.segment_of(block.row_ptr, block.num_edges)]
        norm = torch.where((which == 1) & (block.n_id[block.src] == 12), 100.0, 1.0)
        sampler.update([block], [norm * (block.weight * block.scale).square()])
    square = policy.square[0]
    assert square.numel() == g.num_sources
    assert float(square[30]) > 10 * float(square[0]) and int(policy.visits[0, 30]) > 5 < int(policy.visits[0, 0])


def test_threads_and_reference_draw_alike(many_threads, monkeypatch):
    g, found = typed(), []
    for threads in (1, 2, 8):
        with ops.threads(threads):
            found.append(NeighborSampler(g, [3, 3], draw="systematic", seed=4).sample(range(20)))
    monkeypatch.setenv("ADAHOP_REFERENCE", "1")
    found.append(NeighborSampler(g, [3, 3], draw="systematic", seed=4).sample(range(20)))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a.n_id, b.n_id) and torch.equal(a.pos, b.pos) and torch.equal(a.row, b.row)


def test_what_knows_one_relation_only_says_so():
    g = typed()
    for make_it in (lambda: make("cluster-gcn", g, [-1]), lambda: make("graphsaint", g, [-1]), lambda: Attended(g, 1)):
        with pytest.raises(InputError, match="relation"):
            make_it()
    with pytest.raises(InputError, match="self_loops"):
        g.normalized()
    total = ops.segment_sum(g.normalized("row", self_loops=False).weight, g.row(), g.num_rows)
    assert torch.allclose(total, torch.ones(g.num_rows))
