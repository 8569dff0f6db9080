"""Training with the default method and feedback repeats: any thread count, a fresh process, a checkpoint."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_geometric.nn as pyg
from torch_geometric.data import Data

import adahop
from adahop import ops
from adahop.pyg import AdaptiveNeighborLoader, scale_messages
from conftest import messy_edges

EPOCHS, STEPS = 3, 8  # steps an epoch


def digest(*tensors: torch.Tensor) -> str:
    h = hashlib.blake2b(digest_size=8)
    for t in tensors:
        h.update(t.detach().contiguous().numpy().tobytes())
    return h.hexdigest()


def train(
    kind: str, prefetch: int, save_at: int = -1, path: str = "", resume: bool = False, estimator: str = "snapshot"
) -> list[str]:
    """A digest of every batch from the first (or the checkpoint's next) on, and of the model and sampler at the end."""
    edge_index, _ = messy_edges()
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(4))
    data = Data(x=x, edge_index=edge_index, y=torch.arange(60) % 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = scale_messages({"sage": pyg.GraphSAGE, "gcn": pyg.GCN, "gat": pyg.GAT}[kind](4, 8, 2, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader = AdaptiveNeighborLoader(
        data, [3, 2], batch_size=8, shuffle=True, seed=5, prefetch=prefetch, estimator=estimator
    )
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    said, steps = [], 0
    if resume:
        state = torch.load(path, weights_only=True)
        steps = state.pop("steps")
        for name, part in parts.items():
            part.load_state_dict(state[name])
    loader.learn(model)
    for _ in range(steps // STEPS, EPOCHS):
        for batch in loader:
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
            said.append(digest(batch.n_id, batch.e_id, batch.edge_index, batch.scale))
            steps += 1
            if steps == save_at:
                torch.save({**{name: part.state_dict() for name, part in parts.items()}, "steps": steps}, path)
    loader.learn(None)
    return [*said, digest(*loader.sampler.state_dict().values(), *model.parameters())]


def elsewhere(*calls: tuple) -> list[list[str]]:
    """The same in a process of its own."""
    code = f"import test_pyg_repeat as t\nfor words in {calls!r}: print(*t.train(*words))"
    here, tests = map(str, list(Path(__file__).parents)[:2])
    path = [str(Path(adahop.__file__).parent.parent), here, tests, os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("kind", ["sage", "gcn", "gat"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_any_number_of_threads(many_threads, kind, prefetch):
    runs = []
    for threads in (1, 2, 8):
        with ops.threads(threads):
            runs.append(train(kind, prefetch))
    assert runs[0] == runs[1] == runs[2] and len(set(runs[0])) == EPOCHS * STEPS + 1


def test_learning_decides_the_batches():
    """The tests above would hold without learning too; here it is seen to matter."""
    now, late, other = (train(*words, estimator="plain") for words in (("sage", 0), ("sage", 2), ("gcn", 0)))
    # odds are renewed after some visits of a row; with prefetch, feedback comes two batches later
    assert now[:2] == late[:2] == other[:2] and now[:-1] != late[:-1] and now[:-1] != other[:-1]


def test_a_fresh_process_and_a_checkpoint(tmp_path):
    paths = [str(tmp_path / f"{prefetch}.pt") for prefetch in (0, 2)]
    here = [train("gat", prefetch, 13, path) for prefetch, path in zip((0, 2), paths, strict=True)]
    calls = [("gat", 0), ("gat", 2), ("gat", 0, -1, paths[0], True), ("gat", 2, -1, paths[1], True)]
    # 13 steps: the checkpoint lies in the midst of the second epoch
    assert elsewhere(*calls) == [*here, here[0][13:], here[1][13:]]


@pytest.mark.parametrize("stop", [1, 7, 8, 16, 23])
def test_any_step_is_a_checkpoint(tmp_path, stop):
    path = str(tmp_path / "state.pt")
    whole = train("sage", 2, stop, path)
    assert train("sage", 2, -1, path, True) == whole[stop:]


def test_a_process_may_end_within_an_epoch():
    """With batches handed out and learnt from, and nobody to take them back."""
    code = (
        "import torch, torch_geometric.nn as pyg, adahop\n"
        "from adahop.pyg import AdaptiveNeighborLoader as Loader, scale_messages\n"
        "data, kept = adahop.load('digits'), []\n"
        "for prefetch in (0, 2):\n"
        "    model = scale_messages(pyg.GraphSAGE(64, 8, 2, 10))\n"
        "    loader = Loader(data, [3, 3], data.train_mask, batch_size=64, prefetch=prefetch)\n"
        "    loader.learn(model)\n"
        "    steps = iter(loader)\n"
        "    batch = next(steps)\n"
        "    model(batch.x, batch.edge_index).sum().backward()\n"
        "    kept.append((model, loader, steps, batch))\n"
    )
    path = os.pathsep.join(filter(None, [str(Path(adahop.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert done.returncode == 0 and b"Error" not in done.stderr, done.stderr.decode()
