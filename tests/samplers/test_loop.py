"""The one loop: layers that are skipped, numberings by choice, budgets wherever blocks are drawn."""

from __future__ import annotations

import pytest
import torch

import adahop
from adahop import make, ops
from adahop.block import Seeds
from adahop.methods import METHODS
from adahop.pyg.hops import draw_hops
from adahop.samplers.loop import Compact, Merged, drawn_from, sample

from conftest import messy_graph, same_blocks  # isort: skip

BY_ROWS = [name for name, m in METHODS.items() if m.family in ("node-wise", "layer-wise")]


@pytest.mark.parametrize("name", BY_ROWS)
def test_a_skipped_layer_is_neither_drawn_nor_gathered(name):
    graph = messy_graph().normalized("row")
    sampler = make(name, graph, [6, 6], **({"features": torch.rand(60, 4)} if METHODS[name].needs else {}))
    sampler.skip = frozenset([0])
    first, second = sampler.sample([3, 0, 7])
    assert first.num_edges == 0 and torch.equal(first.n_id, second.n_id) and first.num_dst == second.num_src
    assert second.num_edges > 0


@pytest.mark.parametrize("method", ["labor", "ladies"])
def test_an_exact_first_layer_spares_its_draw(method):
    from adahop.config import Config
    from adahop.run import Run

    config = Config(method=method, estimator="exact", sizes=(20, 20), hidden=4, epochs=1)
    run = Run(adahop.load("digits"), config, 0)
    batch = next(iter(run.loader))
    assert batch.blocks[0].num_edges == 0 and len(batch.blocks[0].n_id) == batch.blocks[1].num_src


def test_numberings_hold_the_same_draws():
    graph = messy_graph().normalized("row")
    sampler = make("graphsage", graph, [3, 4], seed=2, draw="systematic")
    seeds = torch.tensor([3, 0, 7])
    compact = sample(sampler, Seeds(seeds), Compact())
    assert same_blocks(compact, sample(sampler, Seeds(seeds)))
    merged = Merged()
    hops = sample(sampler, Seeds(seeds), merged)[::-1]
    assert torch.equal(hops[0].e_id, compact[1].e_id) and len(set(merged.n_id.tolist())) == merged.n_id.numel()
    for hop, ends in zip(hops, merged.edges, strict=True):
        assert torch.equal(merged.n_id[ends], graph.edge_index()[:, hop.e_id])
    drawn = {int(hop.n_id[t]) for hop in hops for t in range(hop.num_dst)}
    assert sum(hop.num_dst for hop in hops) == len(drawn)  # each node once


def test_padded_slots_hold_what_a_compact_draw_holds():
    graph = messy_graph().normalized("row")
    dst, stream = torch.arange(60), ops.random.Stream(ops.random.key(3), torch.tensor(5), 1)
    loops = int((graph.first - graph.indptr[:-1]).max())
    for how in ("multinomial", "systematic", "depround"):
        for odds in (ops.Odds(), ops.Odds(edge=graph.weight, eta=0.1)):
            f = ops.padded(graph.edges, graph.rows(dst), dst, 3, loops, how, odds, stream)
            want = ops.draw.reference(graph.edges, graph.rows(dst), torch.tensor([3]), how, odds, stream.now())
            used = f.scale > 0
            assert torch.equal(f.pos[used], want.pos) and torch.equal(f.scale[used], want.scale)
            assert torch.equal(used.view(60, -1).sum(1), want.ptr.diff())
            assert bool((f.weight[~used] == 0).all()) and bool((f.prob[~used] == 1).all())
            empty = ~used.view(60, -1)[:, loops:]
            assert torch.equal(f.n_id[60:].view(60, 3)[empty], dst[:, None].expand(60, 3)[empty])


@pytest.mark.parametrize("disjoint", [False, True])
def test_a_budget_is_a_total_in_merged_batches_too(disjoint):
    graph = adahop.load("digits").graph
    sampler = make("graphsage", graph, [300, 200], budget=True)
    hops = draw_hops(sampler, torch.arange(40), disjoint)
    assert hops.num_edges[0] == 200 and abs(hops.num_edges[1] - max(300, hops.num_nodes[1])) <= hops.num_nodes[1]


def test_what_is_described_can_be_made_at_once():
    graph = messy_graph().normalized("row")
    for name in ("bs", "thanos", "labor"):
        sampler = make(name, graph, [3], seed=1)
        rows = graph.rows(torch.arange(20))
        drawn = drawn_from(sampler, rows, sampler.expand(0, rows, sampler.key(0)))
        (block,) = sampler.sample(range(20))
        assert torch.equal(drawn.pos, block.pos) and torch.equal(drawn.scale, block.scale)


def test_an_error_on_the_way_leaves_the_next_batch_sound(monkeypatch):
    graph = messy_graph()
    sampler, other = (make("graphsage", graph, [3, 3], seed=5) for _ in range(2))
    with monkeypatch.context() as patch:
        calls = []

        def broken(layer, rows, key):
            calls.append(layer)
            if len(calls) == 2:
                raise RuntimeError("a broken link")
            return type(sampler).expand(sampler, layer, rows, key)

        patch.setattr(sampler, "expand", broken)
        with pytest.raises(RuntimeError, match="broken link"):
            sampler.sample([3, 0])
    assert same_blocks(sampler.sample([1, 2]), other.sample([1, 2]))
