"""GAS and LMC: equal to training on all nodes where nothing is old or outside."""

from __future__ import annotations

import pytest
import torch

import adahop
from adahop.config import Config
from adahop.loader import Loader
from adahop.metrics import criterion
from adahop.models import make
from adahop.samplers import NeighborSampler
from adahop_lab import stale
from adahop_lab.stale import Stale


@pytest.fixture(scope="module")
def data():
    return adahop.load("planted:300,1800,8,3,signal=0.6")


def trained(model: str, data, arch: str = "residual", layers: int = 3):
    torch.manual_seed(0)
    net = make(model, data.x.shape[1], 8, data.classes, layers=layers, arch=arch).train()
    return net, data.graph.normalized(*net.graph)


def gradient(net) -> torch.Tensor:
    got = torch.cat([p.grad.flatten() for p in net.parameters()])
    net.zero_grad(set_to_none=True)
    return got


def exact(trainer: Stale) -> torch.Tensor:
    """The gradient of the mean loss over all training nodes; what LMC keeps of every node is exact afterwards."""
    everyone = torch.arange(trainer.graph.num_nodes)
    trainer.backward(everyone)
    return gradient(trainer.model)


def by_autograd(net, graph, data) -> torch.Tensor:
    """The same by the library's own batches of all neighbours."""
    nodes = data.train_mask.nonzero().flatten()
    (batch,) = Loader(data, NeighborSampler(graph, [-1] * len(net.convs)), nodes, batch_size=len(nodes))
    criterion(net(batch), batch.y).backward()
    return gradient(net)


@pytest.mark.parametrize("kind", stale.KINDS)
@pytest.mark.parametrize(("model", "arch"), [("gcn", "residual"), ("sage", "plain"), ("gat", "plain")])
def test_a_part_of_all_nodes_is_full_batch_training(data, kind, model, arch):
    net, graph = trained(model, data, arch)
    got = exact(Stale(kind, net, graph, data))
    assert torch.allclose(got, by_autograd(net, graph, data), atol=1e-5)


@pytest.mark.parametrize(
    ("model", "arch", "error"), [("gcn", "residual", 1e-4), ("sage", "plain", 1e-4), ("gat", "residual", 0.1)]
)
def test_with_exact_histories_lmc_returns_the_whole_gradient_and_gas_does_not(data, model, arch, error):
    net, graph = trained(model, data, arch)
    found = {}
    for kind in stale.KINDS:
        trainer = Stale(kind, net, graph, data)
        want = exact(trainer)
        total = torch.zeros_like(want)
        for nodes in torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(1)).tensor_split(4):
            trainer.backward(nodes)  # what it writes is what was there: nothing is old
            total += gradient(net)
        found[kind] = float((total - want).norm() / want.norm())
    assert found["lmc"] < error < found["gas"], "attention is approximate: its sums outside are incomplete"


def test_histories_hold_the_last_outputs(data):
    net, graph = trained("gcn", data)
    trainer = Stale("gas", net, graph, data)
    before = trainer.inputs[1].value.clone()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5)
    nodes = torch.arange(50)
    trainer.backward(nodes)
    new = net.inference(graph, data.x, until=1)
    assert torch.allclose(trainer.inputs[1].value[nodes], new[nodes], atol=1e-5)
    assert torch.equal(trainer.inputs[1].value[50:], before[50:])


def test_beta_mixes_what_is_new_into_what_is_old(data):
    """Nodes outside whose neighbours are all at hand take the new h whole with beta 1."""
    net, graph = trained("gcn", data, layers=2)
    got = []
    for beta in (0.0, 1.0):
        trainer = Stale("lmc", net, graph, data, beta)
        trainer.inputs[1].value.zero_()
        trainer.backward(torch.arange(250))
        got.append(gradient(net))
    assert not torch.allclose(got[0], got[1], atol=1e-5)


@pytest.mark.parametrize("kind", stale.KINDS)
@pytest.mark.parametrize("clusters", [True, False])
def test_training_learns_and_repeats(data, kind, clusters):
    config = Config(method="graphsage", sizes=(2, 2), hidden=16, epochs=6, batch_size=40, dropout=0.1)
    (one, _), (two, _) = (stale.fit(data, config, kind, seed=3, clusters=clusters) for _ in range(2))
    assert [row["val"] for row in one.history] == [row["val"] for row in two.history]
    assert one.history[-1]["loss"] < one.history[0]["loss"] and one.val > 1.5 / data.classes


def test_bad_input(data):
    net, graph = trained("gcn", data)
    with pytest.raises(adahop.InputError, match="`model` must be gcn, sage"):
        Stale("gas", *trained("geniepath", data), data)
    with pytest.raises(adahop.InputError, match="`kind` must be"):
        Stale("vr", net, graph, data)
    with pytest.raises(adahop.InputError, match="`beta` must be"):
        Stale("lmc", net, graph, data, beta=2.0)


@pytest.mark.parametrize("kind", stale.KINDS)
def test_on_a_device(data, kind):
    """All state lies where the graph does; the losses are the CPU's."""
    pytest.importorskip("triton")
    from pretended_cuda import pretended_cuda

    options = {"hidden": 8, "epochs": 2, "batch_size": 64, "dropout": 0.0}
    here, _ = stale.fit(data, Config(**options), kind, clusters=False)
    with pretended_cuda():
        there, trainer = stale.fit(data, Config(**options, device="cuda", tf32=False), kind, clusters=False)
        assert trainer.inputs[1].value.is_cuda and trainer.scratch.is_cuda and not data.x.is_cuda
    assert [row["loss"] for row in there.history] == pytest.approx([row["loss"] for row in here.history], rel=1e-3)
