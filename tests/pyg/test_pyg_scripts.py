"""Scripts as they are written: compiled, checkpointed, averaged, distributed, by Lightning, in half precision, with
accumulated gradients. Model and sampler learn, and where the script computes the same, they learn the same.
"""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, GraphSAGE
from torch_geometric.utils import scatter

from adahop.pyg import AdaptiveNeighborLoader, callback, inference
from adahop.pyg.wrap import propagate_of

NODES, EPOCHS = 90, 4
ESTIMATORS = ("plain", "snapshot")


def the_data() -> Data:
    """The class of a node is that of its neighbours' mean."""
    g = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES, (2, 900), generator=g)
    x = torch.randn(NODES, 6, generator=g) * torch.rand(NODES, 1, generator=g) * 3
    mean = scatter(x[edges[0]], edges[1], dim_size=NODES, reduce="mean")
    return Data(x=x, edge_index=edges, y=mean[:, :3].argmax(1))


def net() -> GraphSAGE:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GraphSAGE(6, 16, num_layers=2, out_channels=3)


def loader_of(data: Data, estimator: str, **more) -> AdaptiveNeighborLoader:
    words = {"batch_size": 15, "shuffle": "sampler" not in more, "seed": 1, "estimator": estimator, **more}
    return AdaptiveNeighborLoader(data, [3, 3], **words)


def call(model, batch):
    return model(batch.x, batch.edge_index)


class Trained(NamedTuple):
    losses: list[float]  # per step
    learnt: torch.Tensor  # the sampler's tracked squares

    @property
    def learns(self) -> bool:
        """Whether the loss fell by a fifth, and the sampler tells nodes apart."""
        first, last = (sum(part) / len(part) for part in (self.losses[:6], self.losses[-6:]))
        return last < 0.8 * first and bool(self.learnt.isfinite().all()) and float(self.learnt.std()) > 0.01

    def same(self, other: Trained, close: float = 1e-4) -> bool:
        return torch.allclose(torch.tensor(self.losses), torch.tensor(other.losses), atol=close) and torch.allclose(
            self.learnt, other.learnt, rtol=close, atol=close
        )


def train(model, estimator, forward=call, group=1, after=None, **more) -> Trained:
    """A plain loop; the optimizer steps after every `group` batches."""
    loader = loader_of(the_data(), estimator, **more)
    loader.learn(model)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.02), []
    for _ in range(EPOCHS):
        for step, batch in enumerate(loader):
            out = forward(model, batch)[: batch.batch_size].float()
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            (loss / group).backward()
            if (step + 1) % group == 0:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if after is not None:
                after(model)
    loader.learn(None)
    return Trained(losses, loader.sampler.policy.square.clone())


@pytest.fixture(scope="module", params=ESTIMATORS)
def plain(request) -> tuple[str, Trained]:
    """The script without any of it."""
    done = train(net(), request.param)
    assert done.learns
    return request.param, done


def test_a_snapshot_is_something_else():
    one, two = (train(net(), estimator) for estimator in ESTIMATORS)
    assert not one.same(two) and one.learns and two.learns


def test_compiled(plain):
    torch._dynamo.reset()
    assert train(torch.compile(net(), backend="eager"), plain[0]).same(plain[1])
    torch._dynamo.reset()


class Saving(nn.Module):
    """Its layers run again when gradients are computed."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.net, self.reentrant = net(), reentrant

    def forward(self, x, edge_index):
        one, two = self.net.convs
        x = x.detach().requires_grad_() if self.reentrant else x
        h = checkpoint(one, x, edge_index, use_reentrant=self.reentrant).relu()
        return checkpoint(two, h, edge_index, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(plain, reentrant):
    assert train(Saving(reentrant), plain[0]).same(plain[1], 1e-3)


class Twice(nn.Module):
    """A layer that is used twice, between others."""

    def __init__(self, conv):
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(6, 8), conv, nn.Linear(8, 3)

    def forward(self, x, edge_index):
        return self.last(self.conv(self.conv(self.first(x), edge_index).relu(), edge_index))


@pytest.mark.parametrize("conv", [GCNConv, GATConv])
@pytest.mark.parametrize("estimator", ["snapshot", "history"])
def test_a_checkpointed_model_has_the_same_gradients(estimator, conv):
    """What runs again lies elsewhere in memory, and is the same forward of the same layer all the same."""
    grads, learnt, taught = [], [], []
    for again in (False, True):
        torch.manual_seed(0)
        model = Twice(conv(8, 8))
        loader = loader_of(the_data(), estimator)
        loader.learn(model)
        update, found = loader.sampler.update, []
        loader.sampler.update = lambda *given, update=update: taught.append(update(*given))
        for _ in range(2):
            for batch in loader:
                words = (batch.x, batch.edge_index)
                out = checkpoint(model, *words, use_reentrant=False) if again else model(*words)
                F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size]).backward()
                found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.05 * p.grad
                        p.grad = None
        loader.learn(None)
        grads.append(torch.stack(found))
        learnt.append(loader.sampler.policy.square.clone())
    assert torch.equal(*grads) and torch.equal(*learnt)
    assert len(taught) == 2 * len(grads[0])  # once per step


def test_an_average_of_the_model(plain):
    """It is updated after every step and evaluated now and then, which the sampler and the snapshot do not notice."""
    model, data, outs = net(), the_data(), []
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def update(model):
        average.update_parameters(model)
        if len(outs) % 5 == 0:
            outs.append(F.cross_entropy(average.eval()(data.x, data.edge_index), data.y))
        outs.append(None)

    assert train(model, plain[0], after=update).same(plain[1])
    scores = [float(o.detach()) for o in outs if o is not None]
    assert scores[-1] < 0.8 * scores[0]
    assert propagate_of(average.module.convs[0]) is None  # copied before the loader learnt from the model
    late = propagate_of(AveragedModel(model).module.convs[0])  # a copy of a model that was learnt from
    assert late.conv is not model.convs[0] and late.memory is None


def test_half_precision(plain):
    def half(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch.x, batch.edge_index)

    done = train(net(), plain[0], half)
    assert done.learns
    assert done.losses[:6] == pytest.approx(plain[1].losses[:6], abs=0.02)  # until what was learnt decides other draws


def test_accumulated_gradients(plain):
    """Several batches per step of the optimizer; all of them teach."""
    done = train(net(), plain[0], group=3)
    assert done.learns and not done.same(plain[1])
    model, data = net(), the_data()
    loader = loader_of(data, plain[0], shuffle=False)
    loader.learn(model)
    kept = list(loader)  # all at once, before any was used
    sum(F.cross_entropy(call(model, b)[: b.batch_size], b.y[: b.batch_size]) for b in reversed(kept)).backward()
    loader.learn(None)
    drawn = torch.unique(torch.cat([b.n_id[b.edge_index[0]] for b in kept]))
    assert drawn.numel() > NODES // 2
    told = float(loader.sampler.policy.square.std()) > 0.01
    assert told == (plain[0] == "plain")  # right after a snapshot nothing is left to chance


# --- processes --------------------------------------------------------------------------------------------------------


def rank_of_two(rank: int, home: Path) -> None:
    """One process of two: DistributedDataParallel, DistributedSampler, both estimators; what it saw, as JSON."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DistributedSampler

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{home / 'store'}", rank=rank, world_size=2)
    out = {}
    for estimator in ESTIMATORS:
        model = DistributedDataParallel(net())
        order = DistributedSampler(range(NODES), num_replicas=2, rank=rank, seed=3)
        done = train(model, estimator, sampler=order)
        out[estimator] = {
            "learns": done.learns, "losses": done.losses, "learnt": done.learnt.tolist(),
            "model": [p.tolist() for p in model.parameters()],
            "score": float(F.cross_entropy(inference(model, the_data()), the_data().y)),
        }  # fmt: skip
    (home / f"{rank}.json").write_text(json.dumps(out))
    del model, done
    gc.collect()  # torch may wait for ever in the end of a DistributedDataParallel that outlives its process group
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(r), str(tmp_path)], stderr=subprocess.PIPE) for r in range(2)
    ]
    said = [rank.communicate(timeout=300)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    one, two = (json.loads((tmp_path / f"{r}.json").read_text()) for r in range(2))
    for estimator in ESTIMATORS:
        a, b = one[estimator], two[estimator]
        assert a["learns"] and b["learns"] and a["score"] < 0.8
        assert a["model"] == b["model"]  # gradients were shared,
        assert a["losses"] != b["losses"] and a["learnt"] != b["learnt"]  # and each learnt from batches of its own
    assert one["plain"]["model"] != one["snapshot"]["model"]


@pytest.mark.parametrize("by", ["loader", "callback"])
def test_lightning(plain, tmp_path, by):
    """A loader that learns, given to the Trainer, or the callback: the same as the loop."""
    L = pytest.importorskip("lightning", reason="lightning is not installed")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loader = loader_of(the_data(), plain[0])

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
            return torch.optim.Adam(self.parameters(), lr=0.02)

    model, calls = Node(), [callback(loader)] if by == "callback" else []
    if by == "loader":
        loader.learn(model.net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_epochs=EPOCHS, callbacks=calls, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(model, loader)
    loader.learn(None)
    done = Trained(model.losses, loader.sampler.policy.square)
    assert done.learns and (by == "callback" or done.same(plain[1]))


if __name__ == "__main__":
    rank_of_two(int(sys.argv[1]), Path(sys.argv[2]))
