"""ClusterGCN, GraphSAINT and random nodes: induced blocks, METIS and its cache, norms that are right on average."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from adahop.checks import InputError
from adahop.graph import Graph
from adahop.loader import Loader
from adahop.methods import METHODS, make
from adahop.models import MODELS
from adahop.models import make as make_model
from adahop.ops import induced
from adahop.samplers import ClusterGCN, GraphSAINT, NeighborSampler, RandomNodes, partition
from adahop.train import train_step


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAHOP_CACHE", str(tmp_path))
    return tmp_path / "partitions"


def random_graph(n=60, m=400, seed=0, loops=True):
    rng = np.random.default_rng(seed)
    edge_index = rng.integers(0, n - 1, (2, m))  # the last node stays alone
    edge_index[:, :20] = edge_index[:, 20:40]  # parallel edges
    if not loops:
        edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    return Graph.from_edge_index(edge_index, rng.random(edge_index.shape[1]) + 0.1, num_nodes=n)


def two_cliques(n=8):
    dense = np.kron(np.eye(2), np.ones((n, n))) - np.eye(2 * n)
    dense[0, n] = dense[n, 0] = 1
    return Graph.from_edge_index(np.stack(np.nonzero(dense.T)))


# --- induced blocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [[], [59], [3, 1, 2], [5, 9, 5, 1, 9], list(range(60))])
def test_induced_is_the_dense_submatrix(nodes):
    g = random_graph()
    ids = torch.tensor(nodes, dtype=torch.long)
    block = ClusterGCN(g, [-1], parts=1).induced(ids)
    got = torch.zeros(len(nodes), len(nodes))
    got.index_put_((block.dst, block.src), block.weight, accumulate=True)
    full = torch.zeros(60, 60)
    full.index_put_((g.dst(), g.indices.long()), g.weight, accumulate=True)
    want = full[ids][:, ids]
    for j in range(len(nodes)):  # a repeated node speaks from its first row alone
        if nodes[j] in nodes[:j]:
            want[:, j] = 0
    assert torch.allclose(got, want, atol=1e-6)
    assert torch.equal(g.edge_index()[:, block.e_id], torch.stack([block.n_id[block.src], block.n_id[block.dst]]))
    plain = induced.reference(g.edges, ids, ids, torch.full((60,), -1, dtype=torch.int32))
    assert all(torch.equal(a, b) for a, b in zip(plain, (block.ptr, block.pos, block.src), strict=True))


@pytest.mark.parametrize("method", ["cluster-gcn", "graphsaint", "rns", "dropedge"])
def test_all_layers_share_the_subgraph_and_all_models_run(method):
    g = random_graph(seed=1)
    y = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(0))
    data = Data(x=torch.eye(60), y=y)
    for name in (name for name in METHODS[method].models if not MODELS[name].typed):
        model = make_model(name, 60, 8, 3)
        sampler = make(method, g.normalized(*model.graph), [-1, -1])
        loader = Loader(data, sampler, torch.arange(20), batch_size=8, prefetch=1)
        batches = list(loader)
        assert len(batches) == len(loader)
        for batch in batches:
            assert batch.blocks[0] is batch.blocks[1] and batch.blocks[0].num_dst == len(batch.n_id)
            assert bool((batch.loss_weight[batch.n_id >= 20] == 0).all())
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            assert torch.isfinite(train_step(model, sampler, optimizer, batch))


@pytest.mark.parametrize("method", ["cluster-gcn", "graphsaint", "rns", "dropedge"])
def test_one_seed_gives_the_same_batches(method):
    g = random_graph(loops=False).normalized()
    runs = []
    for _ in range(2):
        sampler = make(method, g, [-1], seed=3)
        runs.append([b[0] for e in range(3) for s in sampler.epoch(torch.arange(50), 7) for b in [sampler.sample(s)]])
    for a, b in zip(*runs, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, torch.Tensor))
    assert len({tuple(b.n_id.tolist()) for b in runs[0]}) > 1 or method == "cluster-gcn"


@pytest.mark.parametrize(
    "method,options",
    [("cluster-gcn", {"parts": 2}), *(("graphsaint", {"walk": walk}) for walk in ("rw", "node", "edge"))],
)
@pytest.mark.parametrize("n,edges", [(1, []), (5, []), (4, [(0, 1)]), (3, [(0, 0), (1, 1)])])
def test_graphs_with_next_to_nothing(method, options, n, edges):
    g = Graph.from_edge_index(np.array(edges, dtype=np.int64).reshape(-1, 2).T, num_nodes=n)
    for graph in (g, g.normalized()):
        sampler = make(method, graph, [-1, -1], **options)
        for seeds in [*sampler.epoch(torch.arange(n), 2), torch.tensor([], dtype=torch.long), torch.tensor([0, 0])]:
            blocks = sampler.sample(seeds)
            assert torch.equal(blocks[0].n_id[: len(seeds)], seeds)
            assert bool(torch.isfinite(sampler.loss_weight(blocks)).all())
            assert bool(torch.isfinite(blocks[0].scale).all())
        assert list(sampler.epoch([], 2)) == []


# --- ClusterGCN ------------------------------------------------------------------------------------------------------


def test_metis_finds_the_cliques_and_the_batch_keeps_the_edges_between():
    g = two_cliques()
    part = partition.partition(g, 2)
    assert len(set(part[:8].tolist())) == 1 and len(set(part[8:].tolist())) == 1 and part[0] != part[8]
    sampler = ClusterGCN(g.normalized(), [-1], parts=2, clusters=2)
    (seeds,) = sampler.epoch(torch.arange(16), 4)
    block = sampler.sample(seeds)[0]
    assert block.num_edges == g.num_edges + 16  # all, the bridge too
    assert torch.allclose(block.scale, torch.ones(block.num_edges))


def test_rows_keep_their_sum():
    g = random_graph(seed=2).normalized()
    sampler = ClusterGCN(g, [-1], parts=6, clusters=2)
    for seeds in sampler.epoch(torch.arange(60), 1):
        block = sampler.sample(seeds)[0]
        rows = torch.zeros(block.num_dst).index_add_(0, block.dst, block.weight * block.scale)
        assert torch.allclose(rows, torch.ones(block.num_dst), atol=1e-5)
    more = ClusterGCN(g, [-1], parts=6, clusters=2, diagonal=0.5).sample(seeds)[0]
    own = block.is_self()
    assert torch.allclose(more.scale[own], 1.5 * block.scale[own])
    assert torch.equal(more.scale[~own], block.scale[~own])


def test_an_epoch_has_every_counted_node_once_and_skips_idle_clusters():
    g = two_cliques()
    sampler = ClusterGCN(g, [-1], parts=2, clusters=1)
    assert sorted(torch.cat(list(sampler.epoch(torch.arange(16), 1))).tolist()) == list(range(16))
    (only,) = sampler.epoch([1, 2], 1)
    assert sorted(only.tolist()) == list(range(8)) and sampler.batches(torch.tensor([1, 2]), 1) == 1
    weight = sampler.loss_weight(sampler.sample(only))
    assert float(weight.sum()) == 1.0 and int((weight > 0).sum()) == 2


@pytest.mark.parametrize("parts", [1, 2, 7, 16, 100])
def test_metis_on_directed_disconnected_isolated_graphs(parts):
    edges = np.array([[0, 1, 2, 4, 5, 6, 6], [1, 2, 3, 5, 4, 7, 6]])
    part = partition.partition(Graph.from_edge_index(edges, num_nodes=16), parts)
    assert part.shape == (16,) and part.unique().tolist() == list(range(int(part.max()) + 1))
    assert int(part.max()) < min(parts, 16)


def test_the_cache_is_keyed_by_content_and_survives_damage(own_cache, monkeypatch):
    calls = []
    metis = partition._metis
    monkeypatch.setattr(partition, "_metis", lambda g, p: calls.append(p) or metis(g, p))
    g = two_cliques()
    first = partition.partition(g, 2)
    assert torch.equal(partition.partition(g, 2), first) and len(calls) == 1
    partition.partition(g, 3)
    partition.partition(random_graph(), 2)
    assert len(calls) == 3 and len(list(own_cache.iterdir())) == 3
    for damage in (b"", b"not a partition", np.zeros(3, np.int32).tobytes()):
        for file in own_cache.iterdir():
            file.write_bytes(damage)
        assert torch.equal(partition.partition(g, 2), first)
    assert len(calls) == 6
    assert torch.equal(partition.partition(g, 2), first) and len(calls) == 6


def test_without_pymetis_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(InputError, match=r"needs pymetis: pip install adahop\[metis\]"):
        ClusterGCN(two_cliques(), [-1], parts=2)


# --- GraphSAINT ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("walk", ["rw", "node", "edge"])
def test_norms_are_right_on_average(walk):
    g = random_graph(30, 150, loops=False).normalized()
    nodes = torch.arange(0, 29)
    sampler = GraphSAINT(g, [-1], walk=walk, roots=10, length=2, coverage=1500, seed=1)
    kept, scaled, loss, runs = torch.zeros(30), torch.zeros(g.num_edges), torch.zeros(30), 0
    for _ in range(1500):
        for seeds in sampler.epoch(nodes, 4):
            blocks = sampler.sample(seeds)
            block = blocks[0]
            runs += 1
            kept[block.n_id] += 1
            scaled[block.pos] += block.scale
            loss[block.n_id] += sampler.loss_weight(blocks) * len(nodes)
    often = (sampler.edge_count > 300) & (kept[g.dst()] > 300)
    ratio = scaled / kept[g.dst()]
    error = 4 * (2.0 / sampler.edge_count[often].float()).sqrt()  # both the counts and this run are noisy
    assert int(often.sum()) > 50 and bool(((ratio[often] - 1).abs() < error).all())
    assert torch.allclose(loss[nodes][kept[nodes] > 300] / runs, torch.ones(1), atol=0.15)
    assert float(loss[29]) == 0.0
    own = g.indices.long() == g.dst()
    assert torch.equal(ratio[own & often], torch.ones(int((own & often).sum())))


def test_loss_weights_sum_to_one_on_average():
    g = random_graph(loops=False).normalized()
    sampler = GraphSAINT(g, [-1], roots=10, coverage=500)
    sums = [
        sampler.loss_weight(sampler.sample(s)).sum() for _ in range(100) for s in sampler.epoch(torch.arange(40), 4)
    ]
    assert abs(float(torch.stack(sums).mean()) - 1) < 0.02


def test_a_walk_goes_along_edges_and_repeated_seeds_keep_their_rows():
    g = Graph.from_edge_index([[1, 2, 3], [0, 1, 2]], num_nodes=5)  # a path walked against its arrows; 4 is alone
    sampler = GraphSAINT(g, [-1], length=2, coverage=2)
    assert sampler.sample([0])[0].n_id.tolist() == [0, 1, 2]
    assert sampler.sample([4, 0, 4])[0].n_id.tolist() == [4, 0, 4, 1, 2]
    assert sampler.sample([3])[0].n_id.tolist() == [3]


def test_counts_follow_the_nodes():
    sampler = GraphSAINT(random_graph(), [-1], roots=5, coverage=4)
    list(sampler.epoch(torch.arange(10), 1))
    assert sampler.subgraphs == 8 and int(sampler.node_count[:10].min()) >= 4
    before = sampler.node_count.clone()
    list(sampler.epoch(torch.arange(10), 1))
    assert torch.equal(before, sampler.node_count)
    list(sampler.epoch(torch.arange(20, 40), 1))
    assert sampler.subgraphs == 16 and int(sampler.node_count[20:40].min()) >= 4


@pytest.mark.parametrize("options", [{"walk": "metropolis"}, {"roots": 0}, {"length": -1}, {"coverage": 0}])
def test_bad_options(options):
    with pytest.raises(InputError, match="must be"):
        make("graphsaint", random_graph(), [-1], **options)
    with pytest.raises(InputError, match="must be"):
        make("cluster-gcn", random_graph(), [-1], parts=0)


# --- random nodes ----------------------------------------------------------------------------------------------------


def test_parts_are_random_even_and_complete():
    """Two nodes share one of 4 parts of 60 with chance 14/59: 4.5 standard errors over 400 epochs."""
    sampler, together, epochs = RandomNodes(random_graph(), [-1, -1]), 0, 400
    for _ in range(epochs):
        parts = list(sampler.epoch(torch.arange(40), 10))
        assert torch.equal(torch.cat(parts).sort().values, torch.arange(60)) and [len(p) for p in parts] == [15] * 4
        together += sum(bool(torch.isin(torch.tensor([3, 50]), p).all()) for p in parts)
    chance = 14 / 59
    assert abs(together / epochs - chance) < 4.5 * (chance * (1 - chance) / epochs) ** 0.5
    blocks = sampler.sample(parts[0])
    weight = sampler.loss_weight(blocks)
    assert weight[parts[0] >= 40].eq(0).all() and float(weight.sum()) == pytest.approx(1)


def test_one_part_is_the_whole_graph():
    g = random_graph().normalized("row")
    (everyone,) = RandomNodes(g, [-1, -1], parts=1).epoch(range(10), 5)
    model, x = make_model("gcn", 4, 8, 3).eval(), torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    out = model(Data(x=x[everyone], blocks=RandomNodes(g, [-1, -1], parts=1).sample(everyone)))
    assert torch.allclose(out, model.inference(g, x)[everyone], atol=1e-5)


def test_dropped_edges_are_a_share_of_all_and_rows_keep_their_sum():
    """400 draws of each of about 400 edges, share .3: 5 standard errors; self-loops always stay."""
    g = random_graph().normalized("row")
    sampler, seen, everyone = RandomNodes(g, [-1], drop=0.3), torch.zeros(g.num_edges), torch.arange(60)
    for _ in range(400):
        (block,) = sampler.sample(everyone)
        seen[block.pos] += 1
    total = torch.zeros(60).index_add_(0, block.dst, block.weight * block.scale)
    assert torch.allclose(total, torch.ones(60), atol=1e-5)
    loops = g.indices == g.dst()
    share = seen[~loops] / 400
    assert seen[loops].eq(400).all() and abs(float(share.mean()) - 0.7) < 0.005
    assert float((share - 0.7).abs().max()) < 5 * (0.21 / 400) ** 0.5


def test_full_batch_takes_the_step_of_all_neighbours():
    """The gradient of one step is that of every training node with every neighbour."""
    g = random_graph().normalized("row")
    x, nodes = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20)
    data, grads = Data(x=x, y=torch.arange(60) % 3), []
    for sampler in (RandomNodes(g, [-1, -1], parts=1), NeighborSampler(g, [-1, -1])):
        torch.manual_seed(0)
        model = make_model("gcn", 4, 8, 3)
        (batch,) = Loader(data, sampler, nodes, batch_size=20)
        loss = train_step(model, sampler, torch.optim.SGD(model.parameters(), lr=0.1), batch)
        grads.append((float(loss), torch.cat([p.detach().flatten() for p in model.parameters()])))
    assert grads[0][0] == pytest.approx(grads[1][0], abs=1e-6)
    assert torch.allclose(grads[0][1], grads[1][1], atol=1e-6)


@pytest.mark.parametrize("options", [{"parts": 0}, {"drop": 1.0}, {"drop": -0.1}])
def test_bad_options_of_random_nodes(options):
    with pytest.raises(InputError, match=f"`{next(iter(options))}` must be"):
        RandomNodes(random_graph(), [-1], **options)


def test_dropped_edges_take_their_features_along():
    attr = torch.arange(40.0).unsqueeze(1)
    ends = torch.randint(12, (2, 40), generator=torch.Generator().manual_seed(0))
    sampler = RandomNodes(Graph.from_edge_index(ends, num_nodes=12, edge_attr=attr), [-1], parts=1, drop=0.5)
    (block,) = sampler.sample(next(iter(sampler.epoch(torch.arange(12), 12))))
    assert block.num_edges < 40 and torch.equal(block.attr[0].flatten().long(), block.e_id)
