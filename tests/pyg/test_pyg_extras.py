"""Logging, the Lightning callback, what says which extra is missing, and the examples."""

from __future__ import annotations

import difflib
import importlib.util
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data

from adahop.checks import InputError
from adahop.pyg import AdaptiveNeighborLoader, CSVLog, TensorBoardLog, callback, stats
from conftest import messy_edges

EXAMPLES = Path(__file__).parents[2] / "examples"


def messy_loader(**words) -> AdaptiveNeighborLoader:
    edge_index, _ = messy_edges()
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(4))
    return AdaptiveNeighborLoader(Data(x=x, edge_index=edge_index), [3, 2], batch_size=20, **words)


def test_stats():
    batch = next(iter(messy_loader(method="graphsage")))
    numbers = stats(batch)
    assert set(numbers) == {"nodes", "edges", "chance", "scale_max", "even"}
    drawn = torch.cat([b.scale[b.prob < 1] for b in batch.blocks])
    assert numbers["chance"] == pytest.approx(drawn.numel() / batch.num_edges)
    assert numbers["scale_max"] == float(drawn.max()) and 0 < numbers["even"] <= 1
    assert set(stats(next(iter(messy_loader(subgraph_type="induced"))))) == {"nodes", "edges"}


def test_csv_log(tmp_path):
    path = tmp_path / "log.csv"
    log = CSVLog(path)
    log(1, loss=0.5, nodes=3)
    log(2, loss=0.25)
    CSVLog(path)(3, nodes=4)  # a run that goes on
    assert path.read_text() == "step,loss,nodes\n1,0.5,3\n2,0.25,\n3,,4\n"
    with pytest.raises(InputError, match="must be one of step, loss, nodes, got 'odd'"):
        log(4, odd=1)


def test_tensorboard(tmp_path, monkeypatch):
    written = []
    writer = SimpleNamespace(add_scalar=lambda *a: written.append(a))
    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = lambda folder: writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    TensorBoardLog(tmp_path)(7, loss=0.5)
    assert written == [("adahop/loss", 0.5, 7)]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'adahop\[tensorboard\]'"):
        TensorBoardLog(tmp_path)


def test_lightning_callback(monkeypatch, tmp_path):
    """What Lightning calls, in its order, with a batch fetched ahead."""
    fake = ModuleType("lightning.pytorch")
    fake.Callback = object
    monkeypatch.setitem(sys.modules, "lightning.pytorch", fake)
    model = pyg.GCN(4, 8, 2, 3)
    loader, same = messy_loader(method="bs"), messy_loader(method="bs")
    hook = callback(loader, CSVLog(tmp_path / "log.csv"), every=2)
    batches = list(loader)
    for at, batch in enumerate(batches):
        hook.on_train_batch_start(None, model, batch, at)
        model(batch.x, batch.edge_index, batch.edge_weight)
        hook.on_train_batch_end(SimpleNamespace(global_step=at), model, None, batch, at)
    hook.on_train_end(None, model)
    for batch in list(same):
        with same.feedback(model, batch):
            model(batch.x, batch.edge_index, batch.edge_weight)
    assert torch.equal(loader.sampler.policy.log_weight, same.sampler.policy.log_weight)
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    assert not any(m._message_forward_hooks for m in model.modules() if isinstance(m, pyg.MessagePassing))


def test_lightning_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(InputError, match=r"pip install 'adahop\[lightning\]'"):
        callback(messy_loader())


# --- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quickstart", "pyg_after", "gat_learned", "own_sampler"])
def test_examples(name, monkeypatch, capsys):
    monkeypatch.setenv("EPOCHS", "2")
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    scores = re.findall(r"test accuracy ([\d.]+)", capsys.readouterr().out)
    assert scores and all(float(s) > 0.7 for s in scores)
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80


def test_three_lines_make_the_difference():
    before, after = ((EXAMPLES / f"pyg_{name}.py").read_text().splitlines()[1:] for name in ("before", "after"))
    changed = [d for d in difflib.unified_diff(before, after, n=0) if d[0] == "+" and d[:3] != "+++"]
    assert len(changed) == 3 and len(before) < 80


@pytest.mark.skipif(importlib.util.find_spec("pyg_lib") is None, reason="PyG's own loader needs pyg-lib")
def test_the_script_before(monkeypatch, capsys):
    monkeypatch.setenv("EPOCHS", "2")
    monkeypatch.setattr(sys, "argv", ["pyg_before"])
    runpy.run_path(str(EXAMPLES / "pyg_before.py"), run_name="__main__")
    assert "test accuracy" in capsys.readouterr().out
