"""The words that users of PyG's loaders know: what each means here, beside PyG's own NodeLoader where it can run."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.loader import ImbalancedSampler, NodeLoader
from torch_geometric.nn import GraphConv
from torch_geometric.sampler import NumNeighbors

import adahop
from adahop import ops
from adahop.checks import InputError
from adahop.pyg import AdaptiveNeighborLoader, AdaptiveSampler
from conftest import messy_edges


def messy_data() -> Data:
    edge_index, _ = messy_edges()
    data = Data(x=torch.arange(60.0)[:, None], edge_index=edge_index, y=torch.arange(60) % 3)
    data.train_mask = torch.arange(60) % 2 == 0
    return data


def seeds(batch) -> list[int]:
    return batch.n_id[: batch.batch_size].tolist()


def same(one: Data, other: Data) -> bool:
    return all(torch.equal(one[name], other[name]) for name in ("n_id", "e_id", "edge_index", "scale", "input_id"))


# --- which seeds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mask", "list", "all", "given"])
def test_input_id_is_pygs(kind):
    data = messy_data()
    nodes = {"mask": data.train_mask, "list": torch.tensor([8, 3, 5]), "all": None, "given": torch.tensor([8, 3, 5])}
    more = {"input_id": torch.tensor([10, 20, 30])} if kind == "given" else {}
    ours = AdaptiveNeighborLoader(data, [2], nodes[kind], batch_size=7, **more)
    node_sampler = AdaptiveSampler(data, [2])
    theirs = NodeLoader(data, node_sampler, nodes[kind], batch_size=7, transform=node_sampler.attach, **more)
    for a, b in zip(ours, theirs, strict=True):
        assert same(a, b)
    with pytest.raises(InputError, match="`input_id` must have one id per input node, 60 in all"):
        AdaptiveNeighborLoader(data, [2], input_id=torch.arange(3))


def test_a_torch_sampler_gives_the_positions():
    data = messy_data()
    nodes = data.train_mask.nonzero().flatten()
    order = [4, 2, 2, 29, 0]
    loader = AdaptiveNeighborLoader(data, [2], data.train_mask, batch_size=2, sampler=order)
    assert len(loader) == 3 and [seeds(b) for b in loader] == [nodes[[4, 2]].tolist(), nodes[[2, 29]].tolist(), [0]]
    assert len(list(AdaptiveNeighborLoader(data, [2], batch_size=2, sampler=order, drop_last=True))) == 2
    pairs = BatchSampler(SequentialSampler(range(30)), 4, drop_last=True)
    loader = AdaptiveNeighborLoader(data, [2], data.train_mask, batch_sampler=pairs)
    assert len(loader) == 7 == len(list(loader)) and all(b.batch_size == 4 for b in loader)


def test_imbalanced_sampler():
    data = messy_data()
    data.y = (torch.arange(60) >= 54).long()
    torch.manual_seed(0)
    balanced = ImbalancedSampler(data, num_samples=600)
    found = torch.cat([b.y[: b.batch_size] for b in AdaptiveNeighborLoader(data, [2], batch_size=50, sampler=balanced)])
    assert found.numel() == 600 and abs(float(found.float().mean()) - 0.5) < 0.09  # 4.4 standard deviations


def test_distributed_sampler():
    data, parts = messy_data(), []
    for rank in range(2):
        split = DistributedSampler(range(60), num_replicas=2, rank=rank, shuffle=True)
        loader = AdaptiveNeighborLoader(data, [2], batch_size=8, sampler=split)
        first = [s for b in loader for s in seeds(b)]
        split.set_epoch(1)
        assert len(loader) == 4 and [s for b in loader for s in seeds(b)] != first
        parts += first
    assert sorted(parts) == list(range(60))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_epoch_of_a_torch_sampler_goes_on(prefetch):
    def make():
        order = RandomSampler(range(60), generator=torch.Generator().manual_seed(len(made)))
        made.append(AdaptiveNeighborLoader(messy_data(), [2], batch_size=9, sampler=order, prefetch=prefetch))
        return made[-1]

    made: list[AdaptiveNeighborLoader] = []
    found, state = [], None
    whole = make()
    for batch in whole:
        found.append(batch)
        state = whole.state_dict() if len(found) == 3 else state
    rest = make()  # its generator has another seed, which the running epoch does not ask
    rest.load_state_dict(state)
    again = list(rest)
    assert len(found) == 7 and all(same(a, b) for a, b in zip(found[3:], again, strict=True))
    assert not same(next(iter(rest)), found[0])


def test_two_ways_to_say_the_order():
    data = messy_data()
    for words, message in (
        ({"sampler": [1, 2], "shuffle": True}, "`shuffle` must be left out where a `sampler` decides"),
        ({"batch_sampler": [[1]], "shuffle": True}, "`shuffle` must be left out where a `batch_sampler` decides"),
        ({"batch_sampler": [[1]], "sampler": [1]}, "`sampler` must be left out where a `batch_sampler`"),
        ({"batch_sampler": 3}, "`batch_sampler` must give lists of positions"),
        ({"sampler": iter([1])}, "and have a length, got list_iterator"),
        ({"sampler": 3}, "`sampler` must be an adahop NeighborSampler, or a torch sampler"),
    ):
        with pytest.raises(InputError, match=message):
            AdaptiveNeighborLoader(data, [2], **words)
    with pytest.raises(InputError, match=r"got sampler\[1\] = 99"):
        list(AdaptiveNeighborLoader(data, [2], sampler=[1, 99]))


# --- how many neighbours ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [np.array([3, 2]), torch.tensor([3, 2]), NumNeighbors([3, 2]), (3, np.int64(2))])
def test_num_neighbors_in_any_form(given):
    data = messy_data()
    loader = AdaptiveNeighborLoader(data, given, batch_size=9)
    assert loader.num_neighbors == [3, 2]
    assert all(same(a, b) for a, b in zip(loader, AdaptiveNeighborLoader(data, [3, 2], batch_size=9), strict=True))


@pytest.mark.parametrize("method", ["adahop", "bs"])
def test_a_hop_of_none(method):
    loader = AdaptiveNeighborLoader(messy_data(), [3, 0, 2], batch_size=9, method=method)
    assert loader.num_neighbors == [3, 0, 2]
    for a in loader:
        assert a.num_sampled_edges[1:] == [0, 0] and a.num_sampled_nodes[2:] == [0, 0]
        assert a.num_nodes == sum(a.num_sampled_nodes) and a.edge_index.shape[1] == a.num_sampled_edges[0] > 0
        assert len(a.blocks) == 3
    assert AdaptiveNeighborLoader(messy_data(), [0], batch_size=9)([0, 1]).edge_index.shape == (2, 0)


@pytest.mark.parametrize("disjoint", [False, True])
def test_a_budget_is_a_total_per_hop(disjoint):
    """It was read as a fan-out of each node: 37,016 edges for totals of 100."""
    g = torch.Generator().manual_seed(0)
    data = Data(edge_index=torch.randint(400, (2, 16000), generator=g), num_nodes=400)
    loader = AdaptiveNeighborLoader(data, [100, 300], batch_size=20, budget=True, disjoint=disjoint)
    loops = int((data.edge_index[0] == data.edge_index[1]).sum())
    for batch in loader:
        src, dst = batch.edge_index
        for hop, total in enumerate((100, 300)):
            first = sum(batch.num_sampled_edges[:hop])
            edges = slice(first, first + batch.num_sampled_edges[hop])
            drawn = int((src[edges] != dst[edges]).sum())
            assert drawn == total and batch.num_sampled_edges[hop] <= total + loops


# --- options that PyG's users pass -----------------------------------------------------------------------------------


def test_typos_name_the_word_that_was_meant():
    data = messy_data()
    for typo, meant in (("bach_size", "batch_size"), ("num_worker", "num_workers"), ("shufle", "shuffle"),
                        ("ets", "eta"), ("budge", "budget")):  # fmt: skip
        with pytest.raises(InputError, match=f"got '{typo}'; did you mean '{meant}'"):
            AdaptiveNeighborLoader(data, [2], **{typo: 1})
    with pytest.raises(InputError, match=r"an option must be one that the loader or its method takes, got 'zzz'$"):
        AdaptiveSampler(data, [2], zzz=1)


def test_the_seed_that_is_heard():
    data = messy_data()

    def first(**words):
        return next(iter(AdaptiveNeighborLoader(data, [3], batch_size=9, shuffle=True, **words)))

    seed_everything(7)
    heard = first()
    assert same(heard, first(seed=7)) and same(heard, first()) and not same(heard, first(seed=8))
    assert same(heard, first(generator=torch.Generator().manual_seed(7)))
    torch.manual_seed(8)
    assert same(first(), first(seed=8)) and not same(first(), heard)
    torch.seed()  # a random number of torch's own: no seed of the user
    assert same(first(), first(seed=0))
    with pytest.raises(InputError, match="`generator` must be left out where `seed` is given"):
        first(seed=1, generator=torch.Generator())
    torch.manual_seed(7)
    assert AdaptiveSampler(data, [2]).sampler.seed == 7 and AdaptiveSampler(data, [2], seed=3).sampler.seed == 3
    torch.manual_seed(0)


def test_negative_weights():
    data = messy_data()
    _, weight = messy_edges()
    data.edge_weight = torch.where(torch.arange(900) % 3 == 0, -weight, weight)
    conv = GraphConv(1, 1, bias=False)
    want = conv(data.x, data.edge_index, data.edge_weight)
    batch = next(iter(AdaptiveNeighborLoader(data, [-1], batch_size=60)))
    assert torch.allclose(conv(batch.x, batch.edge_index, batch.edge_weight), want[batch.n_id], rtol=1e-4, atol=1e-3)
    for batch in AdaptiveNeighborLoader(data, [2], batch_size=20):
        assert bool((batch.scale > 0).all())
        assert torch.equal(batch.edge_weight.sign(), data.edge_weight[batch.e_id].sign())
    data.edge_weight[4] = float("nan")
    with pytest.raises(InputError, match=r"must be finite"):
        AdaptiveNeighborLoader(data, [2])


@pytest.mark.parametrize("apart", [False, True])
def test_a_transform_runs_where_the_caller_is(apart):
    """With a generator that training uses too, another thread's draws would fall between its own."""
    ran: list[int] = []

    def noted(batch):
        ran.append(threading.get_ident())
        return batch

    with ops.threads(2):
        words = {"batch_size": 9, "prefetch": 2, "transform": noted, "method": "graphsage" if apart else "bs"}
        list(AdaptiveNeighborLoader(messy_data(), [2], **words))
        assert set(ran) == {threading.get_ident()}
        ran.clear()
        list(AdaptiveNeighborLoader(messy_data(), [2], filter_per_worker=True, **words))
        assert len(ran) == 7 and threading.get_ident() not in ran


def test_batches_side_by_side():
    """A method that learns nothing draws in threads, one batch each, and the batches are the same."""
    for disjoint in (False, True):
        words = {"batch_size": 9, "method": "graphsage", "shuffle": True, "disjoint": disjoint}
        plain = list(AdaptiveNeighborLoader(messy_data(), [3, 2], **words))
        with ops.threads(2):
            ahead = AdaptiveNeighborLoader(messy_data(), [3, 2], prefetch=3, **words)
            assert ahead.sampler.parallel and all(same(a, b) for a, b in zip(plain, ahead, strict=True))


def test_transform_sampler_output():
    data, given = messy_data(), []

    def note(out):
        given.append(out)
        out.num_sampled_nodes = [*out.num_sampled_nodes, 0]
        return out

    loader = AdaptiveNeighborLoader(data, [2], data.train_mask, batch_size=9, transform_sampler_output=note)
    batch = next(iter(loader))
    assert torch.equal(given[0].node, batch.n_id) and torch.equal(given[0].edge, batch.e_id)
    assert torch.equal(given[0].metadata[0], batch.input_id) and batch.num_sampled_nodes[-1] == 0

    def cut(out):
        out.row, out.col, out.edge = out.row[1:], out.col[1:], out.edge[1:]
        return out

    with pytest.raises(InputError, match="`transform_sampler_output` must leave node, row, col and edge as drawn"):
        next(iter(AdaptiveNeighborLoader(data, [2], transform_sampler_output=cut)))


def test_neighbor_sampler():
    data = messy_data()
    own = AdaptiveSampler(data, [3, 2], method="bs")
    loader = AdaptiveNeighborLoader(data, neighbor_sampler=own, batch_size=9, sampler=SequentialSampler(range(60)))
    assert loader.sampler is own.sampler and loader.num_neighbors == [3, 2] and len(list(loader)) == 7
    assert AdaptiveNeighborLoader(data, neighbor_sampler=own.sampler).sampler is own.sampler
    assert AdaptiveNeighborLoader(data, sampler=own.sampler).sampler is own.sampler
    with pytest.raises(InputError, match="`neighbor_sampler` must be an adahop NeighborSampler or AdaptiveSampler"):
        AdaptiveNeighborLoader(data, neighbor_sampler=object())
    with pytest.raises(InputError, match="must be left out where `sampler` is one of adahop"):
        AdaptiveNeighborLoader(data, neighbor_sampler=own, sampler=own.sampler)


def test_pin_memory(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    list(AdaptiveNeighborLoader(messy_data(), [2], batch_size=30, pin_memory=True))
    assert bool(pinned) == torch.cuda.is_available()  # as in torch, nothing to pin for without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pinned.clear()
    list(AdaptiveNeighborLoader(messy_data(), [2], batch_size=30))
    assert not pinned
    batch = next(iter(AdaptiveNeighborLoader(messy_data(), [2], batch_size=30, pin_memory=True)))
    assert all(any(t is p for p in pinned) for t in (batch.x, batch.edge_index, batch.n_id))


def test_the_datas_own_ids_stay():
    data = messy_data()
    data.n_id, data.e_id = 1000 + torch.arange(60), 5000 + torch.arange(900)
    batch = next(iter(AdaptiveNeighborLoader(data, [3, 2], batch_size=9)))
    assert torch.equal(batch.x[:, 0].long() + 1000, batch.n_id)
    assert torch.equal((batch.n_id - 1000)[batch.edge_index], data.edge_index[:, batch.e_id - 5000])


# --- states and iterators --------------------------------------------------------------------------------------------


def test_a_state_of_another_batch_size():
    loader, state = AdaptiveNeighborLoader(messy_data(), [2], batch_size=9), None
    for at, _ in enumerate(loader):
        state = loader.state_dict() if at == 2 else state
    other = AdaptiveNeighborLoader(messy_data(), [2], batch_size=10)
    with pytest.raises(InputError, match="`batch_size` must be 9 to go on within the epoch of this state, got 10"):
        other.load_state_dict(state)
    with pytest.raises(InputError, match="the number of `input_nodes` must be 60"):
        AdaptiveNeighborLoader(messy_data(), [2], range(30), batch_size=9).load_state_dict(state)
    other.load_state_dict(loader.state_dict())  # between two epochs any size will do
    assert len(list(other)) == 6 and int(other.sampler.epochs) == 2


def test_a_state_knows_its_seed():
    loader = AdaptiveNeighborLoader(messy_data(), [2], batch_size=9, shuffle=True, seed=3)
    for at, _ in enumerate(loader):
        if at == 2:
            break
    other = AdaptiveNeighborLoader(messy_data(), [2], batch_size=9, shuffle=True, seed=4)
    other.load_state_dict(loader.state_dict())
    whole = list(AdaptiveNeighborLoader(messy_data(), [2], batch_size=9, shuffle=True, seed=3))
    assert all(same(a, b) for a, b in zip(whole[3:], other, strict=True))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_two_iterators_of_one_loader(prefetch):
    """Each goes over all seeds, and updates that wait reach the sampler when the last of them is done."""
    data = messy_data()
    loader = AdaptiveNeighborLoader(data, [2], batch_size=9, shuffle=True, method="bs", prefetch=prefetch)
    pairs = list(zip(loader, loader, strict=True))
    for side in (0, 1):
        assert sorted(s for pair in pairs for s in seeds(pair[side])) == list(range(60))
    assert seeds(pairs[0][0]) != seeds(pairs[0][1]) and int(loader.sampler.epochs) == 2
    assert loader.sampler._pending is None
    left = iter(loader)
    next(left)
    assert len(list(loader)) == 7  # another iterator stays open beside it, as after an interrupt
    del left
    assert loader.sampler._pending is None


@pytest.mark.parametrize("prefetch", [0, 3])
def test_our_own_loader_with_two_iterators(prefetch):
    data = adahop.load("digits")
    loader = adahop.Loader(data, adahop.make("bs", data.graph, [2]), data.train_mask, 400, prefetch=prefetch)
    for one, other in zip(loader, loader, strict=True):
        assert not torch.equal(one.n_id, other.n_id)
    assert loader.sampler._pending is None and loader.state_dict()["taken"] == 0
