"""Loaders as scripts use them: wrapped, zipped, behind NodeLoader and Lightning, with transforms that change edges."""

from __future__ import annotations

import copy
import logging
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader, PrefetchLoader
from torch_geometric.nn import GraphSAGE, SAGEConv
from torch_geometric.transforms import AddSelfLoops, Compose, ToUndirected

from adahop.checks import InputError
from adahop.pyg import AdaptiveNeighborLoader, AdaptiveSampler, callback, inference, scale_messages, unscale_messages
from conftest import messy_edges


def messy_data() -> Data:
    edge_index, _ = messy_edges()
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(4))
    return Data(x=x, edge_index=edge_index, y=torch.arange(60) % 3)


def net(seed: int = 0) -> GraphSAGE:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GraphSAGE(4, 8, num_layers=2, out_channels=3)


def steps(model, batches, lr: float = 0.1) -> list[float]:
    """One epoch of training; the losses."""
    optimizer, out = torch.optim.SGD(model.parameters(), lr=lr), []
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
        out.append(float(loss.detach()))
    return out


def make(data: Data | None = None, **words) -> AdaptiveNeighborLoader:
    words = {"batch_size": 8, "shuffle": True, "seed": 1, **words}
    return AdaptiveNeighborLoader(messy_data() if data is None else data, [3, 2], **words)


# --- wrapped and zipped ----------------------------------------------------------------------------------------------


def test_a_loader_within_pygs_prefetch_loader():
    """It fetches a batch ahead, so that a loader that knew only the batch handed out last scaled the wrong one."""
    own, wrapped = make(method="graphsage"), make(method="graphsage")
    one, other = net(), net()
    own.learn(one)
    wrapped.learn(other)
    assert steps(one, own) == steps(other, PrefetchLoader(wrapped, "cpu"))
    teaches, late = make(method="bs"), net()
    teaches.learn(late)
    steps(late, PrefetchLoader(teaches, "cpu"))
    assert teaches.sampler.policy.log_weight.any()


def test_zipped_loaders_each_learn_from_their_own_batches():
    loaders, model = (make(method="bs"), make(method="bs", seed=2)), net()
    for loader in loaders:
        loader.learn(model)
    for pair in zip(*loaders, strict=True):
        steps(model, pair)
    for loader in loaders:
        assert loader.sampler.policy.log_weight.any()
        loader.learn(None)


def test_the_first_batch_alone():
    loader, model = make(method="bs"), net()
    before = loader.sampler.policy.visits.clone()
    loader.learn(model)
    batch = next(iter(loader))
    steps(model, [batch])
    loader.learn(None)
    assert not torch.equal(loader.sampler.policy.visits, before)
    plain = make(method="bs")
    other = net()
    batch = next(iter(plain))
    with plain.feedback(other, batch):
        steps(other, [batch])
    assert torch.equal(plain.sampler.policy.visits, loader.sampler.policy.visits)


# --- transforms that change edges ------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["plain", "snapshot"])
def test_edges_that_were_not_drawn_teach_nothing(estimator):
    """`ToUndirected` adds edges that estimate no sum: layers see the batch as it is, and a warning says so once."""
    loader, model, plain = make(transform=ToUndirected(), estimator=estimator), net(), net()
    loader.learn(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for batch in loader:
            assert batch.is_undirected()
            out = model(batch.x, batch.edge_index)
            assert torch.allclose(out, plain(batch.x, batch.edge_index), atol=1e-5)
            out.sum().backward()
    assert len({str(w.message) for w in said if "transform" in str(w.message)}) == 1
    assert float(loader.sampler.policy.square.std()) == 0


def test_self_loops_and_other_changes_teach():
    loader, model = make(transform=Compose([AddSelfLoops()])), net()
    loader.learn(model)
    for _ in range(2):
        steps(model, loader)
    assert float(loader.sampler.policy.square.std()) > 0


@pytest.mark.parametrize("estimator", ["plain", "snapshot"])
def test_the_datas_own_ids_mislead_nothing(estimator):
    """The snapshot looked up the data's own `n_id` as if they were places."""
    named = messy_data()
    named.n_id, named.e_id = torch.arange(60).flip(0), torch.arange(900).flip(0)
    loaders, models = (make(estimator=estimator), make(named, estimator=estimator)), (net(), net())
    losses = []
    for loader, model in zip(loaders, models, strict=True):
        loader.learn(model)
        losses.append([loss for _ in range(2) for loss in steps(model, loader)])
    assert losses[0] == losses[1]


# --- NodeLoader and Lightning ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["plain", "snapshot"])
def test_node_loader_is_as_good_as_the_loader(estimator):
    """The same draws, scales, updates and snapshots, epoch by epoch."""
    data = messy_data()
    loader, model = make(data, shuffle=False, estimator=estimator), net()
    sampler, other = AdaptiveSampler(data, [3, 2], seed=1, estimator=estimator), net()
    theirs = NodeLoader(data, sampler, batch_size=8, transform=sampler.attach)
    loader.learn(model)
    sampler.learn(other)
    for _ in range(3):
        assert steps(model, loader) == steps(other, theirs)
    assert torch.equal(loader.sampler.policy.square, sampler.sampler.policy.square)
    assert (sampler._memory is not None) == (estimator == "snapshot")


def test_a_snapshot_behind_node_loader_is_renewed_once_per_epoch(monkeypatch):
    data = messy_data()
    sampler, model = AdaptiveSampler(data, [3, 2], seed=1), net()
    sampler.learn(model)
    made, plain = [], sampler._memory.begin_epoch
    monkeypatch.setattr(sampler._memory, "begin_epoch", lambda: made.append(1) or plain())
    for _ in range(4):
        steps(model, NodeLoader(data, sampler, batch_size=8, shuffle=True, transform=sampler.attach))
    assert len(made) == 4
    made.clear()
    drawn = torch.utils.data.RandomSampler(range(60), replacement=True, num_samples=600)
    steps(model, NodeLoader(data, sampler, batch_size=8, sampler=drawn, transform=sampler.attach))
    assert 8 <= len(made) <= 12  # ten epochs' worth of seeds, though a seed comes again in nearly every batch


@pytest.mark.parametrize("stop", [3, 8, 11])
def test_an_adaptive_sampler_goes_on(stop):
    """What it learned, what it remembers and where the epoch is, within it or at its end."""
    data = messy_data()
    order = [*range(60), *range(59, -1, -1), *range(60)]

    def run(sampler, model, first, last):
        batches = [order[at : at + 8] for at in range(0, 180, 8)][first:last]
        return steps(model, NodeLoader(data, sampler, batch_sampler=batches, transform=sampler.attach))

    whole, model = AdaptiveSampler(data, [3, 2], seed=1), net()
    whole.learn(model)
    losses = run(whole, model, 0, 16)
    first, start = AdaptiveSampler(data, [3, 2], seed=1), net()
    first.learn(start)
    assert run(first, start, 0, stop) == losses[:stop]
    rest = AdaptiveSampler(data, [3, 2], seed=1)
    rest.load_state_dict(first.state_dict())
    first.learn(None)
    rest.learn(start)
    assert run(rest, start, stop, 16) == losses[stop:]
    rest.load_state_dict(whole.sampler.state_dict())  # as 0.1 kept it
    assert int(rest.sampler.step) == 16


def test_lightning_node_data_has_the_snapshot(tmp_path):
    L = pytest.importorskip("lightning")
    from torch_geometric.data.lightning import LightningNodeData

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Node(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = net(), []

        def forward(self, x, edge_index):
            return self.net(x, edge_index)

        def training_step(self, batch, batch_idx):
            out = self(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = messy_data()
    sampler, model = AdaptiveSampler(data, [3, 2], seed=1), Node()
    nodes = LightningNodeData(
        data, input_train_nodes=torch.arange(60), loader="custom", node_sampler=sampler, transform=sampler.attach,
        batch_size=8, num_workers=0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_epochs=3, callbacks=[callback(sampler)], accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(model, datamodule=nodes)
    assert len(model.losses) == 24 and float(sampler.sampler.policy.square.std()) > 0


# --- copies, and the model without adahop -----------------------------------------------------------------------------


def test_a_copy_of_a_loader_draws_the_same_and_learns_from_no_model():
    loader, model = make(), net()
    loader.learn(model)
    steps(model, loader)
    state = loader.state_dict()
    for again in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert again._model is None
        loader.load_state_dict(state)
        assert all(torch.equal(a.n_id, b.n_id) for a, b in zip(again, loader, strict=True))
        again.learn(net())
        steps(again._model, again)


def test_a_copy_of_a_sampler_learns_from_no_model():
    sampler = AdaptiveSampler(messy_data(), [3, 2])
    sampler.learn(net())
    assert pickle.loads(pickle.dumps(sampler))._model is None


def test_a_model_without_what_was_added_is_pygs_alone():
    loader, model = make(), scale_messages(net())
    data = messy_data()
    before = [set(vars(m)) for m in net().modules()]
    loader.learn(model)
    steps(model, loader)
    want = model(data.x, data.edge_index)
    assert unscale_messages(model) is model
    assert [set(vars(m)) for m in model.modules()] == before
    assert not model._forward_hooks and not model._forward_pre_hooks and not model._forward_pre_hooks_with_kwargs
    assert b"adahop" not in pickle.dumps(model)
    assert torch.equal(model(data.x, data.edge_index), want)
    torch.export.export(model.eval(), (data.x, data.edge_index))
    model.train()
    assert loader._model is None and steps(model, loader)  # the loader has let go of it
    loader.learn(model)
    assert steps(model, loader)


def test_a_copy_of_a_model_is_undone_alone():
    loader, model = make(), net()
    loader.learn(model)
    steps(model, loader)
    average = unscale_messages(copy.deepcopy(model))
    assert not average._forward_hooks and len(model._forward_hooks) == 1
    assert steps(model, loader)


def test_a_layer_that_was_replaced_is_told():
    loader, model = make(), net()
    loader.learn(model)
    steps(model, loader)
    model.convs[1] = SAGEConv(8, 3)
    with pytest.raises(InputError, match=r"a layer for each of the 2 hops, got 1; call `learn` again, as"):
        steps(model, loader)


def test_edges_as_an_edge_index():
    """PyG's own class for edges has no memory by which a tensor is recognised."""
    data = messy_data()
    plain = data.edge_index[:, data.edge_index[1].argsort()]
    data.edge_index = EdgeIndex(plain, sparse_size=(60, 60), sort_order="col")
    loader = AdaptiveNeighborLoader(data, [-1, -1], batch_size=8, estimator="snapshot")
    model, same = net(), net()
    loader.learn(model)
    for _ in range(2):
        for batch in loader:
            same.load_state_dict(model.state_dict())
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            assert torch.allclose(out, same(data.x, plain)[batch.n_id[: batch.batch_size]], atol=1e-5)
            out.logsumexp(1).sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
        with torch.no_grad():  # an evaluation of the user's own
            same.load_state_dict(model.state_dict())
            want = same.eval()(data.x, plain)
            assert torch.allclose(model.eval()(data.x, data.edge_index), want, atol=1e-5)
            assert torch.allclose(inference(model, data), want, atol=1e-5)
        model.train()
        same.train()
