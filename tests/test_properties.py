"""Properties that hold for every graph, not only for those we thought of: hypothesis makes the graphs.

Derandomised: the same graphs in every run. A failure prints the smallest one it found.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adahop import Graph, draws
from adahop.methods import METHODS, make
from adahop.ops import DRAWS
from conftest import full_sum, same_blocks

quick = settings(
    max_examples=40, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)  # fmt: skip
few = settings(quick, max_examples=12)


@st.composite
def edge_lists(draw, most_nodes: int = 12, most_edges: int = 40):
    """(nodes, edge_index [2, E], weight or None): parallel edges, self-loops, isolated nodes, nothing at all."""
    n = draw(st.integers(1, most_nodes))
    ends = st.integers(0, n - 1)
    pairs = draw(st.lists(st.tuples(ends, ends), max_size=most_edges))
    weights = st.floats(0, 10, width=32, allow_subnormal=False)
    weight = draw(st.none() | st.lists(weights, min_size=len(pairs), max_size=len(pairs)))
    edge_index = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).t()
    return n, edge_index, None if weight is None else torch.tensor(weight)


def of(edges) -> Graph:
    n, edge_index, weight = edges
    return Graph.from_edge_index(edge_index, weight, num_nodes=n)


def dense(n: int, edge_index: torch.Tensor, weight: torch.Tensor | None) -> np.ndarray:
    a = np.zeros((n, n))
    np.add.at(a, (edge_index[1].numpy(), edge_index[0].numpy()), 1.0 if weight is None else weight.double().numpy())
    return a


# --- Graph -----------------------------------------------------------------------------------------------------------


@quick
@given(edge_lists())
def test_a_graph_is_its_edge_list(edges):
    n, edge_index, _ = edges
    g = of(edges)
    assert (g.num_nodes, g.num_edges) == (n, edge_index.shape[1])
    assert torch.equal(g.edge_index(), edge_index), "the user's order comes back"
    assert torch.equal(g.degree(), torch.bincount(edge_index[1], minlength=n))
    src, dst = g.indices.long(), g.dst()
    eid = torch.arange(g.num_edges) if g.eid is None else g.eid.long()
    assert torch.equal(edge_index[:, eid], torch.stack([src, dst]))
    for i in range(n):  # self-loops first, then the true neighbours
        own = src[g.indptr[i] : g.indptr[i + 1]] == i
        assert int(own.sum()) == int(g.first[i] - g.indptr[i]) and not own[int(own.sum()) :].any()
    h = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(full_sum(g, h).numpy(), dense(*edges) @ h.double().numpy(), atol=1e-4)


@quick
@given(edge_lists(), st.sampled_from(["row", "sym"]), st.booleans())
def test_normalised_rows(edges, kind, loops):
    n, edge_index, weight = edges
    g = of(edges).normalized(kind, loops)
    a = dense(n, edge_index, weight) + (np.eye(n) if loops else 0.0)
    total = a.sum(1)
    if kind == "row":
        wanted = np.divide(a, total[:, None], out=np.zeros_like(a), where=total[:, None] > 0)
    else:
        root = np.divide(1.0, np.sqrt(total), out=np.zeros_like(total), where=total > 0)
        wanted = a * root[:, None] * root[None, :]
    np.testing.assert_allclose(full_sum(g, torch.eye(n)).numpy(), wanted, atol=1e-5)
    assert g.num_edges == edge_index.shape[1] + (n if loops else 0)


@quick
@given(edge_lists(), edge_lists())
def test_equal_hash_means_equal_graph(one, other):
    a, b = of(one), of(other)
    same = a.num_nodes == b.num_nodes and torch.equal(a.edge_index(), b.edge_index())
    same = same and (a.weight is None) == (b.weight is None)
    same = same and (a.weight is None or torch.equal(a.weight, b.weight))
    assert (a.hash() == b.hash()) == same and a.hash() == of(one).hash()


# --- draws -----------------------------------------------------------------------------------------------------------

segments = st.lists(st.lists(st.floats(0, 100, width=32, allow_subnormal=False), max_size=9), min_size=1, max_size=6)


@pytest.mark.parametrize("method", DRAWS)
@quick
@given(segments, st.integers(1, 6), st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.7]))
def test_what_a_draw_says_of_itself(method, parts, k, seed, eta):
    ptr = torch.tensor([0, *np.cumsum([len(p) for p in parts]).tolist()])
    weight = torch.tensor([w for p in parts for w in p], dtype=torch.float32)
    d = draws.draw(method, weight, ptr, k, seed=seed, eta=eta)
    assert d.ptr[0] == 0 and d.ptr[-1] == d.pos.numel() == d.prob.numel() == d.scale.numel()
    assert bool(((d.prob > 0) & (d.prob <= 1)).all()) and bool(torch.isfinite(d.scale).all())
    pi = draws.inclusion(weight, ptr, k, eta)
    for i, part in enumerate(parts):
        pos, prob = (t[d.ptr[i] : d.ptr[i + 1]] for t in (d.pos, d.prob))
        assert bool(((pos >= ptr[i]) & (pos < ptr[i + 1])).all()), "of its own segment"
        if eta == 0.0:
            assert bool((weight[pos] > 0).all()) or len(part) <= k, "what has no weight never comes"
        if len(part) <= k:
            assert bool((prob == 1).all())
        elif method != "multinomial":
            assert pos.unique().numel() == pos.numel(), "each at most once"
            np.testing.assert_allclose(prob.numpy(), pi[pos].numpy(), rtol=2e-3, atol=2e-4)
            if method != "poisson":
                assert pos.numel() == round(float(pi[ptr[i] : ptr[i + 1]].sum())) <= k
        else:
            assert pos.numel() in (0, k)
    assert torch.equal(draws.draw(method, weight, ptr, k, seed=seed, eta=eta).pos, d.pos)


# --- samplers and blocks ---------------------------------------------------------------------------------------------


def check_blocks(graph: Graph, seeds: torch.Tensor, blocks) -> None:
    """What every block promises: ids, order, pointers, weights, and that the layers fit together."""
    source, target = graph.edge_index()
    for block, above in zip(blocks, [*blocks[1:], None], strict=True):
        targets = block.n_id[: block.num_dst]
        assert block.ptr[0] == 0 and block.ptr[-1] == block.num_edges and bool((block.ptr.diff() >= 0).all())
        assert torch.equal(torch.repeat_interleave(torch.arange(block.num_dst), block.ptr.diff()), block.dst)
        assert torch.equal(source[block.e_id], block.n_id[block.src])
        assert torch.equal(target[block.e_id], block.n_id[block.dst])
        assert torch.equal(block.weight, graph.edge_weight()[block.pos])
        assert bool(torch.isfinite(block.scale).all()) and bool((block.scale >= 0).all())
        assert bool(((block.prob > 0) & (block.prob <= 1)).all())
        if above is not None:
            assert torch.equal(targets, above.n_id)
    assert torch.equal(blocks[-1].n_id[: seeds.numel()], seeds), "seeds come first"


@pytest.mark.parametrize("method", METHODS)
@few
@given(edge_lists(), st.data())
def test_blocks_of_any_graph(method, edges, data):
    n = edges[0]
    graph = of(edges).normalized("row", True)
    seeds = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), max_size=6, unique=True)), dtype=torch.long)
    layers, seed = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 1000))
    sampler = make(method, graph, [2] * layers, seed=seed)
    blocks = sampler.sample(seeds)
    check_blocks(graph, seeds, blocks)
    sampler.update(blocks, [torch.rand(b.num_edges, generator=torch.Generator().manual_seed(1)) for b in blocks])
    check_blocks(graph, seeds, sampler.sample(seeds))
    assert same_blocks(make(method, graph, [2] * layers, seed=seed).sample(seeds), blocks)


@pytest.mark.parametrize("method", METHODS)
@few
@given(edge_lists(), st.integers(1, 7))
def test_an_epoch_of_any_graph(method, edges, size):
    graph = of(edges).normalized("row", True)
    sampler, nodes = make(method, graph, [2]), torch.arange(graph.num_nodes)
    parts = list(sampler.epoch(nodes, size))
    assert len(parts) == sampler.batches(nodes, size)
    if METHODS[method].family != "subgraph":
        assert torch.equal(torch.cat(parts).sort().values, nodes) and all(p.numel() <= size for p in parts)
