"""The drop-in loader: what users of PyG's NeighborLoader expect of its batches."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data
from torch_geometric.sampler.base import SubgraphType

import adahop
from adahop import ops
from adahop.checks import IdError, InputError
from adahop.pyg import AdaptiveNeighborLoader
from conftest import messy_edges, toy_data


def messy_data(weight: bool = False) -> Data:
    edge_index, w = messy_edges()
    n, m = 60, edge_index.shape[1]
    data = Data(x=torch.arange(n).float()[:, None].repeat(1, 3), edge_index=edge_index, num_nodes=n)
    data.y, data.train_mask, data.name = torch.arange(n), torch.arange(n) % 2 == 0, "messy"
    data.edge_attr, data.edge_kind = torch.arange(m).float()[:, None], torch.arange(m) % 7
    if weight:
        data.edge_weight = w
    return data


def same(one: Data, other: Data) -> bool:
    names = ("n_id", "e_id", "edge_index", "scale", "input_id", "edge_weight")
    return all(torch.equal(one[name], other[name]) for name in names)


def check(batch: Data, data: Data) -> None:
    """Local edges are the data's at e_id; attributes are those of n_id and e_id."""
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
    assert torch.equal(batch.x, data.x[batch.n_id]) and torch.equal(batch.y, data.y[batch.n_id])
    assert torch.equal(batch.train_mask, data.train_mask[batch.n_id]) and batch.name == "messy"
    assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
    assert torch.equal(batch.edge_kind, data.edge_kind[batch.e_id])
    assert batch.num_nodes == batch.n_id.numel() and batch.validate()


# --- what a batch holds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["adahop", "graphsage", "bs", "bs.m"])
@pytest.mark.parametrize("sizes", [[4, 3], [2, -1, 2], [5]])
def test_a_batch(method, sizes):
    data = messy_data()
    loader = AdaptiveNeighborLoader(data, sizes, data.train_mask, batch_size=7, method=method)
    assert len(loader) == 5 and loader.num_neighbors == sizes
    nodes = data.train_mask.nonzero().flatten()
    for at, batch in enumerate(loader):
        assert torch.equal(batch.input_id, nodes[7 * at : 7 * at + 7])  # places in the mask, as in PyG
        assert batch.batch_size == len(batch.input_id)
        assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
        assert batch.n_id.unique().numel() == batch.n_id.numel()
        check(batch, data)
    assert at == 4


def test_hops_are_counted():
    data = messy_data()
    for batch in AdaptiveNeighborLoader(data, [3, 2], batch_size=6, shuffle=True, method="graphsage", replace=False):
        nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
        assert nodes[0] == 6 and sum(nodes) == batch.num_nodes and len(nodes) == 3
        assert len(edges) == 2 and sum(edges) == batch.edge_index.shape[1]
        src, dst = batch.edge_index
        assert int(dst[: edges[0]].max()) < 6  # the first hop reaches the seeds
        rest = dst[edges[0] :]
        assert bool((rest >= 6).all() and (rest < 6 + nodes[1]).all())  # the second the nodes it found, each once
        fresh = src[: edges[0]]
        assert fresh.max() < 6 + nodes[1] and sorted(set(fresh[fresh >= 6].tolist())) == [*range(6, 6 + nodes[1])]


@pytest.mark.parametrize("k", [1, 3])
def test_no_more_neighbours_than_asked(k):
    data = messy_data()
    batch = next(iter(AdaptiveNeighborLoader(data, [k], batch_size=60, replace=False)))
    true = batch.edge_index[0] != batch.edge_index[1]
    degree = torch.bincount(data.edge_index[1][data.edge_index[0] != data.edge_index[1]], minlength=60)
    got = torch.bincount(batch.edge_index[1][true], minlength=60)
    assert torch.equal(got, degree.clamp(max=k))
    assert batch.e_id.unique().numel() == batch.e_id.numel()
    loops = (data.edge_index[0] == data.edge_index[1]).sum()
    assert (~true).sum() == loops and bool((batch.scale[~true] == 1).all())  # self-loops come exactly


def test_all_neighbours():
    data = messy_data(weight=True)
    batch = next(iter(AdaptiveNeighborLoader(data, [-1], batch_size=60)))
    assert torch.equal(batch.e_id.sort().values, torch.arange(900)) and bool((batch.scale == 1).all())
    assert torch.equal(batch.edge_weight, data.edge_weight[batch.e_id])


@pytest.mark.parametrize("conv", [pyg.GraphConv, pyg.SAGEConv, pyg.GATConv, pyg.GINConv])
def test_all_neighbours_give_the_models_own_output(conv):
    """Two layers on the merged hops: what the seeds get is what the whole graph gives them."""
    torch.manual_seed(0)
    data = messy_data()
    data.x = torch.randn(60, 3)
    one, two = (conv(torch.nn.Linear(3, 3)) if conv is pyg.GINConv else conv(3, 3) for _ in range(2))
    want = two(one(data.x, data.edge_index).relu(), data.edge_index)
    for disjoint in (False, True):
        for batch in AdaptiveNeighborLoader(data, [-1, -1], data.train_mask, batch_size=7, disjoint=disjoint):
            out = two(one(batch.x, batch.edge_index).relu(), batch.edge_index)[: batch.batch_size]
            assert torch.allclose(out, want[batch.n_id[: batch.batch_size]], atol=1e-5)


def test_replace():
    data = messy_data()
    hub = AdaptiveNeighborLoader(data, [60], [3], batch_size=1, method="graphsage", replace=True)
    batch = next(iter(hub))
    assert batch.e_id.numel() > batch.e_id.unique().numel()  # 60 of some 120: a repeat is certain enough
    hub = AdaptiveNeighborLoader(data, [60], [3], method="graphsage", replace=False)
    batch = next(iter(hub))
    assert batch.e_id.numel() == batch.e_id.unique().numel()
    assert (
        hub.sampler.how == "systematic"
        and AdaptiveNeighborLoader(data, [2], method="bs.m", replace=False).sampler.how == "depround"
    )


def test_weighted():
    data = messy_data()
    data.prefer = torch.zeros(900)
    data.prefer[data.edge_index[0] < 20] = torch.rand(int((data.edge_index[0] < 20).sum())) + 0.5
    loader = AdaptiveNeighborLoader(data, [4, 4], batch_size=20, weight_attr="prefer")
    for batch in loader:
        true = batch.edge_index[0] != batch.edge_index[1]
        assert bool((data.prefer[batch.e_id[true]] > 0).all())
        assert "prefer" in batch and torch.equal(batch.prefer, data.prefer[batch.e_id])
    data.prefer[5] = -1.0
    with pytest.raises(InputError, match=r"weight\[5\]"):
        AdaptiveNeighborLoader(data, [4], weight_attr="prefer")
    with pytest.raises(InputError, match="`weight_attr` must name an attribute"):
        AdaptiveNeighborLoader(data, [4], weight_attr="prefers")


def test_disjoint():
    data = messy_data()
    for batch in AdaptiveNeighborLoader(data, [3, 3], [3, 8, 3, 9], batch_size=4, disjoint=True):
        check(batch, data)
        assert batch.batch[:4].tolist() == [0, 1, 2, 3] and batch.n_id[:4].tolist() == [3, 8, 3, 9]
        src, dst = batch.edge_index
        assert torch.equal(batch.batch[src], batch.batch[dst])  # no edge between two trees
        key = batch.batch * 60 + batch.n_id
        assert key.unique().numel() == key.numel()
        assert sum(batch.num_sampled_nodes) == batch.num_nodes
    with pytest.raises(InputError, match="`disjoint` must be False for induced"):
        AdaptiveNeighborLoader(data, [2], disjoint=True, subgraph_type="induced")


def test_bidirectional():
    data = messy_data()
    drawn = next(iter(AdaptiveNeighborLoader(data, [3, 3], batch_size=6)))
    both = next(iter(AdaptiveNeighborLoader(data, [3, 3], batch_size=6, subgraph_type=SubgraphType.bidirectional)))
    pairs = {tuple(p) for p in drawn.edge_index.t().tolist()}
    want = pairs | {(b, a) for a, b in pairs}
    assert torch.equal(both.n_id, drawn.n_id) and {tuple(p) for p in both.edge_index.t().tolist()} == want
    assert both.edge_index.shape[1] == len(want) and bool((both.scale == 1).all())
    forward = torch.equal(both.n_id[both.edge_index], data.edge_index[:, both.e_id])
    assert not forward and "num_sampled_nodes" not in both
    ends = data.edge_index[:, both.e_id].sort(0).values
    assert torch.equal(both.n_id[both.edge_index].sort(0).values, ends)  # an edge's id is that of its drawn way


@pytest.mark.parametrize("words", [{"subgraph_type": "induced"}, {"directed": False}])
def test_induced(words):
    data = messy_data()
    for batch in AdaptiveNeighborLoader(data, [2], batch_size=6, **words):
        check(batch, data)
        inside = torch.isin(data.edge_index, batch.n_id).all(0).nonzero().flatten()
        assert torch.equal(batch.e_id.sort().values, inside)


def test_isolated_empty_and_repeated():
    data = messy_data()
    batch = next(iter(AdaptiveNeighborLoader(data, [3, 3], [57, 58], batch_size=2)))
    assert batch.n_id.tolist() == [57, 58] and batch.edge_index.shape == (2, 0)
    assert batch.num_sampled_nodes == [2, 0, 0] and batch.num_sampled_edges == [0, 0]
    assert list(AdaptiveNeighborLoader(data, [3], torch.zeros(60, dtype=torch.bool))) == []
    batch = next(iter(AdaptiveNeighborLoader(data, [3, 3], [3, 3], batch_size=2)))
    assert batch.n_id[:2].tolist() == [3, 3] and batch.n_id[2:].unique().numel() == batch.num_nodes - 2
    check(batch, data)
    bare = Data(x=torch.ones(4, 2), edge_index=torch.empty(2, 0, dtype=torch.long))
    for kind in ("directional", "bidirectional", "induced"):
        batch = next(iter(AdaptiveNeighborLoader(bare, [2, 2], batch_size=4, subgraph_type=kind)))
        assert batch.num_nodes == 4 and batch.edge_weight.shape == (0,)
    one = next(iter(AdaptiveNeighborLoader(Data(edge_index=torch.zeros(2, 1, dtype=torch.long), num_nodes=1), [2])))
    assert one.edge_index.tolist() == [[0], [0]]


def test_as_many_edges_as_nodes():
    data = Data(x=torch.eye(3), edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]), edge_attr=torch.arange(3.0))
    batch = next(iter(AdaptiveNeighborLoader(data, [1], [2])))
    assert torch.equal(batch.x, data.x[[2, 1]]) and batch.edge_attr.tolist() == [1.0]


def test_transform_call_and_drop_last():
    data = messy_data()
    loader = AdaptiveNeighborLoader(data, [2], batch_size=7, drop_last=True, transform=lambda b: b.update({"seen": 1}))
    assert len(loader) == 8 and [b.batch_size for b in loader] == [7] * 8
    batch = loader([5, 6])
    assert batch.seen == 1 and batch.n_id[:2].tolist() == [5, 6] and loader.dataset == range(60)


# --- the same seed, the same batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("disjoint", [False, True])
def test_threads_and_prefetch(many_threads, disjoint):
    data, runs = messy_data(), []
    for threads, prefetch in ((1, 0), (2, 0), (8, 0), (1, 2), (8, 2)):
        loader = AdaptiveNeighborLoader(
            data, [3, 3], batch_size=9, shuffle=True, seed=5, prefetch=prefetch, disjoint=disjoint
        )
        with ops.threads(threads):
            runs.append([b for _ in range(2) for b in loader])
    assert len(runs[0]) == 14 and not same(runs[0][0], runs[0][7])
    for other in runs[1:]:
        assert all(same(a, b) for a, b in zip(runs[0], other, strict=True))
    other = list(AdaptiveNeighborLoader(data, [3, 3], batch_size=9, shuffle=True, seed=6))
    assert not same(runs[0][0], other[0])


FINGERPRINT = """
import hashlib, torch
from adahop.pyg import AdaptiveNeighborLoader
from torch_geometric.data import Data
g = torch.Generator().manual_seed(0)
data = Data(edge_index=torch.randint(50, (2, 800), generator=g), num_nodes=50)
h = hashlib.blake2b(digest_size=8)
for batch in AdaptiveNeighborLoader(data, [3, 3], batch_size=9, shuffle=True, seed=5):
    for t in (batch.n_id, batch.e_id, batch.edge_index, batch.scale):
        h.update(t.contiguous().numpy().tobytes())
print(h.hexdigest())
"""


def test_a_fresh_process(capsys):
    exec(FINGERPRINT, {})
    here = capsys.readouterr().out
    path = os.pathsep.join([str(Path(adahop.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    there = subprocess.run(
        [sys.executable, "-c", FINGERPRINT], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert there.stdout == here and len(here) == 17


def test_the_order_is_that_of_our_own_loader():
    data = toy_data()
    theirs = Data(x=data.x, y=data.y, edge_index=data.graph.edge_index())
    ours = adahop.Loader(data, adahop.make("bs", data.graph, [2, 2], seed=3), batch_size=50)
    for a, b in zip(ours, AdaptiveNeighborLoader(theirs, [2, 2], batch_size=50, shuffle=True, seed=3), strict=True):
        assert torch.equal(a.n_id[: a.batch_size], b.n_id[: b.batch_size])


# --- the scale ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [{"method": "graphsage"}, {"method": "bs.m"}, {"method": "bs"}, {"weight_attr": "p"},
                                   {"method": "bs.m", "policy": "tracked", "draw": "systematic"},
                                   {"method": "bs", "disjoint": True}, {}])  # fmt: skip
def test_unbiased(words):
    data = messy_data(weight=True)
    data.p = torch.rand(900, generator=torch.Generator().manual_seed(3)) + 0.1
    loader = AdaptiveNeighborLoader(data, [3, 2], torch.arange(40), batch_size=40, **words)
    policy = loader.sampler.policy
    if hasattr(policy, "arms"):
        noise = torch.randn(policy.log_weight.shape, generator=torch.Generator().manual_seed(1))
        policy.arms.put(slice(None), noise.exp())
    h = torch.randn(60, generator=torch.Generator().manual_seed(2)).double()
    full = torch.zeros(60).double().index_add_(
        0, data.edge_index[1], data.edge_weight.double() * h[data.edge_index[0]]
    )  # fmt: skip
    rounds, sums = 800, []
    for _ in range(rounds):
        for batch in loader:
            src, dst = batch.edge_index
            message = (batch.scale * batch.edge_weight).double() * h[batch.n_id[src]]
            sums.append(torch.zeros(batch.num_nodes).double().index_add_(0, dst, message)[:40])
    sums = torch.stack(sums)
    error, spread = sums.mean(0) - full[:40], sums.std(0) / rounds**0.5
    z = error[spread > 1e-9] / spread[spread > 1e-9]
    assert len(z) > 30 and float(z.abs().max()) < 4.5 and 0.6 < float(z.square().mean()) < 1.6
    assert bool((error[spread <= 1e-9].abs() < 1e-4).all())


# --- what is refused or passed over -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "message"), [
    ({"method": "ladies"}, "`method` must be one of adahop, graphsage, bs, bs.m in this loader, got 'ladies'"),
    ({"method": "s-gcn"}, "`method` must be one of adahop"),
    ({"method": "thanos"}, "`method` must be one of adahop, graphsage, bs, bs.m in this loader, got 'thanos'"),
    ({"method": "thanos.m"}, "`method` must be one of adahop, graphsage, bs, bs.m in this loader"),
    ({"policy": "thanos"}, "`policy` must learn from the squared norms of messages"),
    ({"policy": "attended"}, "`policy` must learn from the squared norms of messages"),
    ({"method": "bsm"}, "did you mean"),
    ({"num_neighbors": {("a", "to", "b"): [2]}}, "as the data has no edge types, got a dict"),
    ({"num_neighbors": [3, -2]}, "must hold whole numbers of at least -1"),
    ({"num_neighbors": 3}, "must be a list with one number per hop"),
    ({"time_attr": "time"}, "temporal sampling is not supported yet"),
    ({"edge_label_index": torch.zeros(2, 3)}, "link-level loading is not supported yet"),
    ({"input_nodes": ("paper", None)}, "as the data has no node types, got a node type"),
    ({"subgraph_type": "whole"}, "`subgraph_type` must be one of directional"),
    ({"batch_size": 0}, "`batch_size` must be a whole number"),
    ({"stepp": 3}, "got 'stepp'"),
    ({"sampler": 3}, "`sampler` must be an adahop NeighborSampler"),
])  # fmt: skip
def test_refusals(words, message):
    with pytest.raises(InputError, match=message):
        AdaptiveNeighborLoader(**{"data": messy_data(), "num_neighbors": [2, 2], **words})


def test_more_refusals():
    with pytest.raises(InputError, match="`data` must be a PyG Data or HeteroData, got tuple"):
        AdaptiveNeighborLoader((1, 2), [2])
    with pytest.raises(IdError, match=r"got input_nodes\[0\] = 60"):
        AdaptiveNeighborLoader(messy_data(), [2], [60])
    other = adahop.make("bs", adahop.Graph.from_edge_index([[0], [1]]), [2])
    with pytest.raises(InputError, match="must be over the graph of the data"):
        AdaptiveNeighborLoader(messy_data(), sampler=other)


def test_options_of_workers_are_passed_over():
    with pytest.warns(UserWarning, match="`num_workers` is not used"):
        AdaptiveNeighborLoader(messy_data(), [2], num_workers=2, persistent_workers=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdaptiveNeighborLoader(messy_data(), [2], num_workers=0, is_sorted=True)


def test_our_own_data_sets():
    data = adahop.load("digits")
    batch = next(iter(AdaptiveNeighborLoader(data, [5, 5], data.train_mask, batch_size=16)))
    assert type(batch) is Data and "graph" not in batch and batch.num_edges == batch.e_id.numel()
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
