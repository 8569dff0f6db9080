"""lab/benchmarks/gpu_epoch.py: its typed part runs without a GPU, on a part of the graph."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

import adahop
from adahop.samplers.loop import Padded

FILE = Path(__file__).parents[2] / "lab" / "benchmarks" / "gpu_epoch.py"


@pytest.fixture
def script():
    pytest.importorskip("triton")
    spec = importlib.util.spec_from_file_location("gpu_epoch", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_typed_epoch_and_what_it_drew(script, tmp_path):
    words = ["--parts", "typed", "--device", "cpu", "--share", "0.0003", "--only", "rgcn adahop"]
    script.main([*words, "--out", str(tmp_path / "rows.json")])
    found = json.loads((tmp_path / "rows.json").read_text())
    row = found["typed"]["rgcn adahop eager"]
    assert "failed" not in row, row
    assert "--share 0.0003" in found["command"] and "relations=8" in found["typed_graph"]
    assert row["losses"][-1] < row["losses"][0] and 0 < row["edges"] < row["slots"] and row["M_edges_s"] > 0


def test_what_lies_below_an_empty_slot_is_not_counted(script):
    """By the edges of a compact block, where each seed is met once and no node twice in the next hop."""
    script.DEV = "cpu"
    data = script.mag_like(0.0003)
    kinds = data.graph.types.num_nodes
    assert list(kinds) == ["paper", "author", "institution", "field"] and len(data.graph.relations) == 8
    sampler = adahop.make("graphsage", data.graph, [2, 3], seed=1)
    seeds = data.train_mask.nonzero().flatten()[:1]
    padded = sampler.sample(seeds, Padded.fitted(sampler, seeds=seeds))
    sampler.step.zero_()
    first, second = sampler.sample(seeds)
    drawn = second.n_id[second.src]  # a node that was drawn twice has a subtree for each
    below = torch.cat([seeds, drawn])
    many = torch.stack([(first.targets[first.dst] == node).sum() for node in below.tolist()])
    assert int(script.drawn(padded)) == second.num_edges + int(many.sum())
