"""PyG's loader on a device: all of a batch is born there, and what is drawn, trained and learnt is what the CPU does.

Without a GPU the device is one that tensors only pretend to lie on, see `elsewhere`: tensors of two devices in one
operation are an error there too.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter

import pytest
import torch
from test_pyg_hetero import SAGE, Mixed, made, typed_data
from test_pyg_loader import messy_data
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import GATConv, GCNConv, HGTConv, SAGEConv, to_hetero

from adahop import ops
from adahop.checks import InputError
from adahop.policies import base
from adahop.pyg import AdaptiveNeighborLoader, AdaptiveSampler
from adahop.samplers.reach import expected_reads
from elsewhere import ELSEWHERE, pretended

CONVS = {"sage": SAGEConv, "gcn": GCNConv, "gat": GATConv}
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def alike(monkeypatch):
    """The CPU draws as a device does: plain torch, by a scan of the odds."""
    monkeypatch.setenv("ADAHOP_REFERENCE", "1")
    for owner in (ops, base):
        monkeypatch.setattr(owner, "goes_by_sums", lambda at: False)


class Net(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.one, self.two = CONVS[kind](3, 8), CONVS[kind](8, 4)

    def forward(self, x, edge_index):
        return self.two(self.one(x, edge_index).relu(), edge_index)


def some_data() -> Data:
    data = messy_data()
    data.x = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    data.y = data.y % 4
    return data


def loader_of(device=None, **words) -> AdaptiveNeighborLoader:
    data, where = some_data(), {} if device is None else {"device": device}
    words = {"batch_size": 7, "seed": 3, "shuffle": True, **where, **words}
    return AdaptiveNeighborLoader(data, [4, 3], data.train_mask, **words)


def tensors(batch: Data | HeteroData) -> dict[str, Tensor]:
    """All of a batch by name, its blocks too."""
    stores = batch.stores if isinstance(batch, HeteroData) else [batch]
    found = {f"{getattr(s, '_key', '')}.{k}": v for s in stores for k, v in s.items() if torch.is_tensor(v)}
    for i, block in enumerate(batch.blocks):
        found |= {f"block {i}.{k}": v for k, v in block._asdict().items() if torch.is_tensor(v)}
    return found


def places(batch: Data | HeteroData) -> set[torch.device]:
    return {t.device for t in tensors(batch).values()}


def equal(one: Data | HeteroData, other: Data | HeteroData) -> bool:
    a, b = ({k: v.cpu() for k, v in tensors(batch).items()} for batch in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Data) -> Tensor:
    out = model(batch.x, batch.edge_index)[: batch.batch_size]
    loss = F.cross_entropy(out, batch.y[: batch.batch_size])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(device=None, kind: str = "sage", reads: Counter | None = None, **words) -> dict[str, Tensor]:
    """The losses of three epochs and what was learnt by then, on the CPU; of `reads`, sizes and copies after the first
    epoch."""
    torch.manual_seed(0)
    model, loader, losses = Net(kind).to(device or "cpu"), loader_of(device, **words), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader.learn(model)
    for _ in range(3):
        for batch in loader:
            assert device is None or len(places(batch)) == 1
            losses.append(step(model, optimizer, batch))
        if reads is not None and len(losses) <= len(loader):
            reads.clear()
    told = {} if reads is None else {"reads": torch.tensor([reads["size"], reads["copy"]])}
    state = {k: v.cpu() for k, v in loader.sampler.policy.state_dict().items() if "prefix" not in k}
    return {"losses": torch.stack(losses).cpu(), **state, **told}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[k].double(), other[k].double()) for k in one)


# --- one device or another --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["adahop", "graphsage"])
def test_the_cpu_as_a_device_changes_nothing(method):
    assert same(trained(method=method), trained("cpu", method=method))
    assert all(equal(a, b) for a, b in zip(loader_of(method=method), loader_of("cpu", method=method), strict=True))


@pytest.mark.parametrize("estimator", ["plain", "snapshot", "history"])
@pytest.mark.parametrize("kind", list(CONVS))
def test_another_device_trains_and_learns_alike(alike, kind, estimator):
    want = trained(kind=kind, estimator=estimator)
    with pretended():
        ours = trained(ELSEWHERE, kind, estimator=estimator)
    assert same(ours, want) and float((want["visits"] > 0).double().mean()) > 0.3


@pytest.mark.parametrize("method", ["bs", "bs.m", "graphsage"])
def test_every_method_does(alike, method):
    want = trained(method=method)
    with pretended():
        assert same(trained(ELSEWHERE, method=method), want)


def test_uniform_draws_are_those_of_the_cpu_s_kernels():
    words = {"method": "graphsage", "replace": False}
    want = list(loader_of(**words))
    with pretended():
        assert all(equal(a, b) for a, b in zip(loader_of(ELSEWHERE, **words), want, strict=True))


@pytest.mark.parametrize(
    "words",
    [
        {"disjoint": True}, {"subgraph_type": "induced"}, {"subgraph_type": "bidirectional"}, {"replace": True},
        {"weight_attr": "edge_kind"}, {"budget": True}, {"padded": True}, {"sampler": [3, 1, 2, 9]},
        {"batch_sampler": [[3, 1], [2]]},
    ],
    ids=lambda words: next(iter(words)),
)  # fmt: skip
def test_with_other_words(alike, words):
    own = {"method": "graphsage"} if "weight_attr" not in words else {}
    if {"sampler", "batch_sampler"} & words.keys():
        own |= {"shuffle": False}
    if "batch_sampler" in words:
        own |= {"batch_size": 1}
    want = [b.to_dict() for b in loader_of(**words, **own)]
    with pretended():
        found = list(loader_of(ELSEWHERE, **words, **own))
        assert all(v.device == ELSEWHERE for b in found for v in b.to_dict().values() if torch.is_tensor(v))
        ours = [{k: v.cpu() for k, v in b.to_dict().items() if torch.is_tensor(v)} for b in found]
    assert len(ours) == len(want) > 0
    assert all(torch.equal(v, b[k]) for a, b in zip(ours, want, strict=True) for k, v in a.items())


def test_nothing_of_a_batch_goes_through_the_host():
    """After the first epoch, in which layers are looked at, single numbers and sizes are all that is read."""
    with pretended() as reads:
        sizes, copies = trained(ELSEWHERE, reads=reads)["reads"].tolist()
        assert sizes > 0 and copies == 0


def test_numbering_reads_one_size():
    with pretended() as reads:
        dst, src = torch.tensor([5, 2, 5], device=ELSEWHERE), torch.tensor([2, 9, 0, 9, 5], device=ELSEWHERE)
        scratch = torch.full((10,), -1, dtype=torch.int32, device=ELSEWHERE)
        reads.clear()
        n_id, local = ops.relabel(dst, src, scratch)
        assert reads == {"size": 1}
        assert (n_id.tolist(), local.tolist()) == ([5, 2, 5, 9, 0], [1, 3, 4, 3, 0])


@pytest.mark.parametrize("prefetch", [1, 3])
def test_drawn_ahead_on_a_device_is_drawn_by_the_caller(alike, monkeypatch, prefetch):
    """A thread of its own would queue on another stream than the caller's; updates still come exactly as late."""
    want, threads = trained(prefetch=prefetch), set()
    plain = AdaptiveNeighborLoader.sample

    def sample(self, *args):
        threads.add(threading.current_thread())
        return plain(self, *args)

    monkeypatch.setattr(AdaptiveNeighborLoader, "sample", sample)
    with pretended():
        assert same(trained(ELSEWHERE, prefetch=prefetch), want)
    assert threads == {threading.main_thread()}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("there", [False, True])
def test_a_state_of_one_device_goes_on_on_another(alike, there, prefetch):
    """Within an epoch, with batches drawn ahead and updates that wait."""
    words = {"estimator": "plain", "prefetch": prefetch}

    def run(loader, model, stop=None) -> list[Tensor]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
        loader.learn(model)
        for batch in loader:
            losses.append(step(model, optimizer, batch).cpu())
            if len(losses) == stop:
                break
        return losses

    torch.manual_seed(0)
    model = Net("sage")
    begin = {k: v.clone() for k, v in model.state_dict().items()}
    want = run(loader_of(**words), model)
    model.load_state_dict(begin)
    with pretended():
        first, then = (ELSEWHERE, None) if there else (None, ELSEWHERE)
        one = Net("sage").to(first or "cpu")
        one.load_state_dict(begin)
        loader = loader_of(first, **words)
        losses = run(loader, one, stop=2)
        other = Net("sage").to(then or "cpu")
        other.load_state_dict(one.state_dict())
        state, loader = loader.state_dict(), loader_of(then, **words)
        loader.load_state_dict(state)
        losses += run(loader, other)
    assert torch.allclose(torch.stack(losses), torch.stack(want))


# --- typed data -------------------------------------------------------------------------------------------------------


def hetero(kind: str, data: HeteroData) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "to_hetero":
            return made(to_hetero(SAGE(), data.metadata()), data)
        return made(Mixed(), data) if kind == "mixed" else made(Attention(data), data)


class Attention(nn.Module):
    def __init__(self, data: HeteroData):
        super().__init__()
        self.one, self.two = (HGTConv(-1, 4, data.metadata(), heads=2) for _ in range(2))

    def forward(self, x_dict, edge_index_dict):
        return self.two(self.one(x_dict, edge_index_dict), edge_index_dict)


def trained_typed(kind: str, device=None, **words) -> dict[str, Tensor]:
    data, losses = typed_data(), []
    model = hetero(kind, data).to(device or "cpu")
    where = {} if device is None else {"device": device}
    words = {"batch_size": 16, "seed": 1, **where, **words}
    loader = AdaptiveNeighborLoader(data, [3, 3], ("paper", data["paper"].train_mask), **words)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader.learn(model)
    for _ in range(2):
        for batch in loader:
            assert device is None or len(places(batch)) == 1
            own = batch["paper"]
            out = model(batch.x_dict, batch.edge_index_dict)["paper"][: own.batch_size]
            loss = F.cross_entropy(out, own.y[: own.batch_size])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    state = {k: v.cpu() for k, v in loader.sampler.policy.state_dict().items() if "prefix" not in k}
    return {"losses": torch.stack(losses).cpu(), **state}


@pytest.mark.parametrize("kind", ["to_hetero", "mixed", "hgt"])
@pytest.mark.parametrize("estimator", ["plain", "snapshot"])
def test_typed_data_on_another_device(alike, kind, estimator):
    want = trained_typed(kind, estimator=estimator)
    with pretended():
        assert same(trained_typed(kind, ELSEWHERE, estimator=estimator), want)


# --- features on the host ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [0.0, 0.3, 1.0, 0, 24 * 12, 1 << 30])
def test_a_cache_changes_no_batch(cache):
    data, bare = some_data(), [b.to_dict() for b in loader_of("cpu", method="graphsage")]
    loader = loader_of("cpu", method="graphsage", cache=cache)
    assert all(torch.equal(v, b[k]) for a, b in zip(loader, bare, strict=True)
               for k, v in a.to_dict().items() if torch.is_tensor(v))  # fmt: skip
    room = cache * data.x.nbytes if isinstance(cache, float) else min(cache, data.x.nbytes)
    assert loader.cache.bytes == room // 12 * 12  # whole rows
    rate = loader.hit_rate()
    assert rate == pytest.approx({0.0: 0.0, 1.0: 1.0, 1 << 30: 1.0}.get(cache, rate)) and loader.hit_rate() == 1.0
    assert cache not in (0.3, 24 * 12) or 0.3 < rate < 1.0


@pytest.mark.parametrize("estimator", ["plain", "snapshot", "history"])
def test_training_with_a_cache(alike, estimator):
    want = trained(estimator=estimator)
    with pretended():
        assert same(trained(ELSEWHERE, estimator=estimator, cache=0.3), want)


def test_a_cache_of_typed_data(alike):
    """Rows of all types share the room; each batch has what it would have without."""
    data = typed_data()
    words = {"batch_size": 16, "seed": 1, "method": "graphsage"}
    seeds = ("paper", data["paper"].train_mask)
    want = list(AdaptiveNeighborLoader(data, [3, 3], seeds, **words))
    with pretended():
        loader = AdaptiveNeighborLoader(data, [3, 3], seeds, **words, device=ELSEWHERE, cache=0.5)
        assert all(equal(a, b) and places(a) == {ELSEWHERE} for a, b in zip(loader, want, strict=True))
        total = sum(data[kind].x.nbytes for kind in data.node_types)
        assert 0.45 * total < loader.cache.bytes <= 0.5 * total and 0.5 < loader.hit_rate() < 1.0
        assert len(loader.cache.copies["topic", "x"][0]) == 0  # its nodes are reached from no paper


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_cache_keeps_the_precision(dtype):
    data = some_data()
    data.x = data.x.to(dtype)
    batch = next(iter(AdaptiveNeighborLoader(data, [2], device="cpu", cache=0.5, batch_size=9)))
    assert batch.x.dtype == dtype and torch.equal(batch.x, data.x[batch.n_id])


@pytest.mark.parametrize("words", [{}, {"disjoint": True}, {"weight_attr": "weight"}], ids=str)
def test_expected_reads_are_the_share_of_batches_that_read_a_node(words):
    """2,000 batches; the estimate takes hops as independent and copies within a batch as one, so within .08."""
    data = some_data()
    data.weight = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(0))
    own = {} if "weight_attr" in words else {"method": "graphsage", "replace": False}
    loader = AdaptiveNeighborLoader(data, [3, 2], data.train_mask, batch_size=3, shuffle=True, seed=0, **own, **words)
    want, batches = torch.zeros(60), 0
    for _ in range(200):
        for batch in loader:
            want[batch.n_id.unique()] += 1
            batches += 1
    found = expected_reads(loader.sampler, loader.nodes, 3)
    assert batches == 2000 and float((found - want / batches).abs().max()) < 0.08
    assert float(want.max() - want.min()) > 0.3 * batches


def test_the_rows_most_likely_to_be_read_are_near():
    loader = loader_of("cpu", method="graphsage", cache=0.25)
    often = expected_reads(loader.sampler, loader.nodes, loader.batch_size)
    near = loader.cache.copies[None, "x"][1] >= 0
    assert int(near.sum()) == 15 and float(often[near].min()) >= float(often[~near].max())
    list(loader)
    rate = loader.hit_rate()
    assert rate == pytest.approx(float(often[near].sum() / often.sum()), abs=0.05) and rate > 0.3


@pytest.mark.parametrize(
    ("cache", "told"),
    [(1.5, "a number in"), (-1, "a whole number"), (-0.5, "a number in"), ("all", "a whole number"), (True, "a whole")],
)
def test_what_a_cache_cannot_be(cache, told):
    with pytest.raises(InputError, match=rf"`cache` must be {told}.*, got"):
        loader_of("cpu", cache=cache)


def test_a_cache_needs_a_device():
    with pytest.raises(InputError, match=r"`cache` must be left out where no `device` is given, got 0\.5"):
        loader_of(cache=0.5)


# --- PyG's own loader -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("typed", [False, True])
def test_a_sampler_of_pyg_draws_there(alike, typed):
    data = typed_data() if typed else some_data()
    seeds = ("paper", data["paper"].train_mask) if typed else data.train_mask
    words = {"batch_size": 8, "input_nodes": seeds}
    own = AdaptiveSampler(data, [3, 2], seed=4)
    want = list(NodeLoader(data, node_sampler=own, transform=own.attach, **words))
    with pretended():
        sampler = AdaptiveSampler(data, [3, 2], seed=4, device=ELSEWHERE)
        there = data.clone().to(ELSEWHERE)
        found = list(NodeLoader(there, node_sampler=sampler, transform=sampler.attach, **words))
        kept = [{k: v for k, v in tensors(b).items() if "input_id" not in k} for b in found]  # PyG's own, on the CPU
        assert {v.device for b in kept for v in b.values()} == {ELSEWHERE}
        assert all(torch.equal(v.cpu(), tensors(b)[k]) for a, b in zip(kept, want, strict=True) for k, v in a.items())


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AdaptiveNeighborLoader, AdaptiveSampler])
@pytest.mark.parametrize("device", ["gpu", 7.5, "cuda:99"])
def test_a_device_that_is_not_there(kind, device):
    with pytest.raises(InputError, match="`device` must be a device of this machine, like cpu"):
        kind(some_data(), [2], device=device)


def test_the_user_s_data_stays_where_it_is():
    data = some_data()
    with pretended():
        AdaptiveNeighborLoader(data, [2], device=ELSEWHERE)
        assert all(not v.is_cuda and v.is_cpu for v in data.to_dict().values() if torch.is_tensor(v))


# --- a GPU ------------------------------------------------------------------------------------------------------------


@on_cuda
@pytest.mark.parametrize("estimator", ["plain", "snapshot", "history"])
@pytest.mark.parametrize("kind", list(CONVS))
def test_a_gpu_trains(kind, estimator):
    """Weighted draws differ there, so the losses are alike, not equal; uniform ones are those of the CPU."""
    ours, want = (trained(d, kind, estimator=estimator)["losses"] for d in ("cuda", None))
    assert torch.isfinite(ours).all() and abs(float(ours[-5:].mean() - want[-5:].mean())) < 0.3
    same_draws = {"method": "graphsage", "replace": False}
    assert all(equal(a, b) for a, b in zip(loader_of("cuda", **same_draws), loader_of(**same_draws), strict=True))


@on_cuda
@pytest.mark.parametrize("kind", ["to_hetero", "mixed", "hgt"])
def test_typed_data_on_a_gpu(kind):
    ours, want = (trained_typed(kind, d, method="graphsage", replace=False)["losses"] for d in ("cuda", None))
    assert torch.allclose(ours, want, rtol=1e-3, atol=1e-4)
