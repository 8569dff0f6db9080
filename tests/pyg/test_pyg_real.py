"""Lightning and TensorBoard themselves, not stand-ins: training, learning, logs, and going on from a checkpoint."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from adahop.pyg import AdaptiveNeighborLoader, AdaptiveSampler, CSVLog, TensorBoardLog, callback, scale_messages
from conftest import messy_edges

pytestmark = pytest.mark.filterwarnings("ignore")


def messy_data() -> Data:
    edge_index, _ = messy_edges()
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(4))
    return Data(x=x, edge_index=edge_index, y=torch.arange(60) % 3)


def lightning_run(folder, learner, log=None, loader=None, data=None, ckpt=None):
    """Two epochs of 8 steps; the e_id of every batch that the model was given."""
    L = pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Node(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen = scale_messages(GraphSAGE(4, 8, num_layers=2, out_channels=3)), []

        def training_step(self, batch, batch_idx):
            self.seen.append(batch.e_id)
            out = self.net(batch.x, batch.edge_index, edge_weight=batch.edge_weight)[: batch.batch_size]
            return F.cross_entropy(out, batch.y[: batch.batch_size])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Node()
        save = L.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1, filename="{step}")
        trainer = L.Trainer(
            max_epochs=2, callbacks=[callback(learner, log, every=4), save], accelerator="cpu", logger=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, loader, datamodule=data, ckpt_path=ckpt)
    return model.seen


def same(a: list, b: list) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_lightning_goes_on_within_an_epoch(tmp_path, prefetch):
    def make():
        return AdaptiveNeighborLoader(messy_data(), [3, 2], batch_size=8, shuffle=True, prefetch=prefetch)

    whole, rest, log = make(), make(), CSVLog(tmp_path / "log.csv")
    seen = lightning_run(tmp_path, whole, log, whole)
    assert len(seen) == 16 and float(whole.sampler.policy.square.std()) > 0.01  # it learned
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 5
    for step in (5, 10):
        rest = make()
        assert same(lightning_run(tmp_path, rest, None, rest, ckpt=tmp_path / f"step={step}.ckpt"), seen[step:])
        assert torch.equal(whole.sampler.policy.square, rest.sampler.policy.square)


def test_lightning_node_data(tmp_path):
    pytest.importorskip("lightning")
    from torch_geometric.data.lightning import LightningNodeData

    def make():
        data = messy_data()
        sampler = AdaptiveSampler(data, [3, 2], method="bs.m")
        nodes = LightningNodeData(data, input_train_nodes=torch.arange(60), loader="custom", node_sampler=sampler,
                                  transform=sampler.attach, batch_size=8, num_workers=0)  # fmt: skip
        return sampler, nodes

    sampler, nodes = make()
    assert len(lightning_run(tmp_path, sampler, None, data=nodes)) == 16
    assert sampler.sampler.policy.log_weight.any()
    saved = torch.load(tmp_path / "step=10.ckpt", weights_only=True)["callbacks"]["adahop"]
    again, nodes = make()
    assert len(lightning_run(tmp_path, again, None, data=nodes, ckpt=tmp_path / "step=10.ckpt")) == 6
    assert again.sampler.step == 16 and saved["sampler"]["step"] == 10


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoardLog(tmp_path)
    log(1, loss=0.5, nodes=3)
    log(2, loss=0.25)
    log.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in found.Scalars("adahop/loss")] == [(1, 0.5), (2, 0.25)]
    assert [(e.step, e.value) for e in found.Scalars("adahop/nodes")] == [(1, 3.0)]
