"""advise: what it says of a graph, and that what it recommends can be run."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace

import pytest
import torch

import adahop
from adahop.cli.advise import command
from adahop.config import Config
from adahop.diagnostics import advise as advice
from adahop.graph import Graph
from adahop.race import Arm
from conftest import messy_graph


def test_what_learning_can_take_away():
    """By hand on a weighted graph: the sums over neighbours written out."""
    g = messy_graph().normalized("row")
    h = torch.randn(60, 5, generator=torch.Generator().manual_seed(0)).exp()
    best = even = 0.0
    for i in range(60):
        part = slice(int(g.indptr[i]), int(g.indptr[i + 1]))
        size = g.weight[part].double() * h[g.indices[part].long()].double().norm(dim=1)
        best += float(size.sum() ** 2)
        even += len(size) * float(size.square().sum())
    assert advice.max_reduction(g, h) == pytest.approx(1 - best / even, rel=1e-4)
    assert advice.max_reduction(Graph.from_edge_index(torch.empty(2, 0), num_nodes=3), torch.ones(3, 2)) == 0.0


def test_homophily_of_training_labels():
    data = adahop.load("planted:600,12000,4,3,signal=0.6,own=1")
    same, chance = advice.homophily(data)
    dst = torch.repeat_interleave(torch.arange(600), data.graph.indptr.diff())
    both = data.train_mask[dst] & data.train_mask[data.graph.indices.long()]
    want = (data.y[dst] == data.y[data.graph.indices.long()])[both].float().mean()
    assert same == pytest.approx(float(want)) and same > 0.65
    assert chance == pytest.approx(1 / 3, abs=0.05)
    data.train_mask[:] = False
    assert advice.homophily(data) == (None, None)


def test_several_labels_overlap():
    a, b = torch.tensor([[1.0, 1, 0], [0, 0, 1]]), torch.tensor([[1.0, 0, 0], [0, 0, 1]])
    assert advice._agreement(a, b) == pytest.approx((0.5 + 1.0) / 2)


def test_it_recommends_one_of_its_candidates(monkeypatch):
    monkeypatch.setattr(advice, "ENOUGH", 10**6)  # however fast the machine is, the race was short
    monkeypatch.setattr(advice, "CANDIDATES", advice.CANDIDATES[::5])  # one of each method: this is about the form
    said = []
    data = adahop.load("planted:300,3000,4,2")
    found = json.loads(json.dumps(advice.advise(data, Config(hidden=8, lr=0.02), 0.002, say=said.append)))
    assert {(c["method"], c["k"]) for c in found["candidates"]} == {("adahop", 2), ("graphsage", 10)}
    assert all(c["epochs"] >= 1 and c["step_ms"] > 0 and 0 < c["val"] <= 1 for c in found["candidates"])
    assert len(found["learning"]) == 2 and all(0 <= share < 1 for share in found["learning"])
    assert found["not_tried"] and "too few to be sure" in found["recommended"]["why"] and len(said) == 5
    assert found["recommended"]["sure"] is False
    chosen = found["recommended"]
    words = shlex.split(command("my graph.npz", chosen, Config(hidden=8, lr=0.02)))
    flags = dict(zip(words[2::2], words[3::2], strict=True))
    assert words[:2] == ["adahop", "train"] and flags["--dataset"] == "my graph.npz" and flags["--lr"] == "0.02"
    assert flags["--method"] == chosen["method"] and "--batch-size" not in flags


def test_steps_are_timed_where_an_epoch_has_but_one():
    """The first step compiles kernels: one alone would be its time."""
    data = adahop.load("planted:300,3000,4,2")
    one = advice._candidate(data, Config(hidden=8, sizes=(2, 2), batch_size=1000), 0, "graphsage", 2)
    one.measure()
    assert one.run.result.steps == advice.FEW + 1


def test_it_says_how_sure_it_is():
    config = Config()
    first, level = candidate(config, "adahop", 2, 0.80), candidate(config, "adahop", 5, 0.799)
    behind, unjudged = candidate(config, "adahop", 10, 0.6), candidate(config, "graphsage", 2, 0.6)
    assert advice._sure(first, [behind]) == {"sure": True, "as_good": []}
    assert advice._sure(first, [level, behind]) == {"sure": False, "as_good": ["adahop, k = 5"]}
    unjudged.best.groups = []
    assert advice._sure(first, [unjudged])["as_good"] == ["graphsage, k = 2"]
    first.run.result.epochs = 3
    assert advice._sure(first, [behind]) == {"sure": False, "as_good": []}


def candidate(config, method, k, val):
    """One that was judged; the scores without each group of nodes differ by about .01 from one to the next."""
    gen = torch.Generator().manual_seed(k)
    groups = (val + 0.01 * torch.randn(20, generator=gen)).tolist()
    run = SimpleNamespace(config=config, result=SimpleNamespace(val=val, epochs=20))
    return advice.Candidate(method, k, run, best=Arm(0.0, [val], groups))
