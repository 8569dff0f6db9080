"""Diagnostics of typed graphs: variance and bounds per layer and relation."""

from __future__ import annotations

import json

import pytest
import torch

import adahop
from adahop import ops
from adahop.config import Config
from adahop.diagnostics import Truth, gradient_variance, measure, variance
from adahop.diagnostics import advise as advice
from adahop.diagnostics.frozen import frozen
from adahop.samplers import NeighborSampler

from test_diagnostics import command  # isort: skip
from typed_graphs import COUNTS, RELATIONS, build, dense, encoded, typed_data  # isort: skip

MODELS = ("rgcn", "rgat", "hgt")
INTO = {t: [r for r, (_, _, target) in enumerate(RELATIONS) if target == t] for t in COUNTS}


def test_truth_by_hand_and_in_chunks():
    data = typed_data()
    model = build("rgcn", data, layers=1)
    graph = data.graph.normalized(*model.graph)
    truth = Truth(model, graph, data.x, {"venue": [2, 0], "paper": [7, 3, 7]})
    assert truth.nodes.tolist() == [3, 7, 65, 67] and set(truth.first) == {*INTO["paper"], *INTO["venue"]}
    h = encoded(model, data)
    for r, a in enumerate(dense(data)):
        if r in truth.first:
            nodes = torch.tensor([3, 7] if RELATIONS[r][2] == "paper" else [65, 67])
            assert torch.allclose(truth.sums[0, r], (a @ h)[nodes], atol=1e-5), r
    inference, model.inference = model.inference, lambda graph, x: inference(graph, x, edges=50)
    again = Truth(model, graph, data.x, truth.nodes)
    assert all(torch.allclose(again.sums[key], found, atol=1e-5) for key, found in truth.sums.items())


@pytest.mark.parametrize("estimator", ["plain", "snapshot", "exact+history"])
@pytest.mark.parametrize("name", MODELS)
def test_everyone_drawn_is_the_truth(name, estimator):
    data = typed_data()
    model = build(name, data)
    graph = data.graph.normalized(*model.graph)
    sampler = adahop.make("graphsage", graph, [-1, -1])
    sampler.skip = model.remember(estimator, graph, data.x)
    with frozen(model):
        rows = measure(model, sampler, data.x, Truth(model, graph, data.x, torch.arange(75)), 1)
    assert {(row.layer, row.relation) for row in rows} == {
        (layer, r) for layer in (0, 1) for r in range(len(RELATIONS))
    }
    for row in rows:
        assert row.variance < 1e-9 and row.ess is None and row.coverage == 1.0 and row.effective == 0.0


@pytest.mark.parametrize("name", ["rgcn", "hgt"])
def test_what_a_memory_takes_away(name):
    """Seen in the rows of the layer drawn: with a snapshot that is a little old, a part of what it is without."""
    data, found = typed_data(), {}
    for estimator in ("plain", "exact+snapshot"):
        model = build(name, data)
        graph = data.graph.normalized(*model.graph)
        sampler = adahop.make("graphsage", graph, [2, 2])
        sampler.skip = model.remember(estimator, graph, data.x)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.02)
        rows = variance(model, sampler, data, nodes=range(40), repeats=5, against=(), gradient=False)
        found[estimator] = {(row["layer"], *row["relation"]): row for row in rows}
    for key, row in found["exact+snapshot"].items():
        plain = found["plain"][key]["variance"]
        assert row["variance"] < (1e-9 if key[0] == 1 else 0.05 * plain), key


def test_uniform_draws_of_one_relation_by_the_formula():
    """n^2 / k (mean |m|^2 - |mean m|^2) of draws with replacement, per relation, with k of its own."""
    data = typed_data()
    model = build("rgcn", data, layers=1)
    graph = data.graph.normalized(*model.graph)
    sampler = NeighborSampler(graph, {"writes": [2], "cites": [3], "default": [1]}, seed=1)
    rows = variance(model, sampler, data, nodes=range(30), repeats=400, against=("uniform",), gradient=False)
    assert [row["relation"] for row in rows] == [list(RELATIONS[r]) for r in INTO["paper"]]
    h, starts = encoded(model, data).detach().double(), data.x.schema.starts
    for row in rows:
        k = {"writes": 2, "cites": 3}.get(row["relation"][1], 1)
        s, _, t = row["relation"]
        src, dst = data.edges[tuple(row["relation"])]
        want = []
        for i in range(30):
            m = h[src[dst == i] + starts[s]] / max(int((dst == i).sum()), 1)
            own = (src[dst == i] + starts[s] == i + starts[t]).nonzero().flatten()
            m = m[[e for e in range(len(m)) if e not in own.tolist()]]  # a self-loop is never left to chance
            n = len(m)
            want.append(0.0 if n <= k else float(n * m.square().sum() - m.sum(0).square().sum()) / k)
        assert abs(row["variance"] - sum(want) / 30) < 5 * row["error"], row["relation"]
        assert 0.8 < row["over_uniform"] < 1.25


def test_the_oracle_is_best_in_every_relation():
    data = typed_data(seed=3)
    data.x.tables["author"] *= torch.linspace(0.1, 3, 25).unsqueeze(1)
    model = build("rgcn", data, layers=1)
    graph = data.graph.normalized(*model.graph)
    for row in variance(model, adahop.make("graphsage", graph, [2]), data, nodes=range(40), repeats=150):
        assert row["effective_over_oracle"] >= 1 - 1e-6 and row["gradient_variance"] > 0


def test_the_gradient_of_all_neighbours_has_no_variance():
    data = typed_data()
    for name in MODELS:
        model = build(name, data)
        graph = data.graph.normalized(*model.graph)
        data.y = data.y.clamp(min=0)
        assert gradient_variance(model, NeighborSampler(graph, [-1, -1]), data, range(20), 2) < 1e-10


def test_bounds_per_relation():
    data = typed_data()
    model = build("rgcn", data)
    graph = data.graph.normalized(*model.graph)
    (first, _) = advice.learnable_share(model, graph, data.x)
    assert list(first) == ["__".join(r) for r in RELATIONS]
    size = encoded(model, data).detach().norm(dim=1)
    kind, dst = graph.types.relation[graph.row()], graph.dst()
    for r, share in enumerate(first.values()):
        mine = kind == r
        each, at = graph.weight[mine] * size[graph.indices[mine].long()], dst[mine]
        best = ops.segment_sum(each, at, 75).square().sum()
        even = (torch.bincount(at, minlength=75) * ops.segment_sum(each.square(), at, 75)).sum()
        assert share == pytest.approx(float(1 - best / even) if mine.any() else 0.0, abs=1e-5)
    assert advice.in_words([first])[0].count("to") == 1 and advice.in_words([0.25]) == ["25%"]


def test_advice_on_a_typed_graph(monkeypatch):
    monkeypatch.setattr(advice, "CANDIDATES", advice.CANDIDATES[1::4])
    found = advice.advise(typed_data(), Config(model="rgcn", hidden=8), 0.002)
    assert len(json.loads(json.dumps(found))["learning"]) == 2 and found["graph"]["features"]["paper"]["columns"] == 5
    assert found["recommended"]["method"] in ("adahop", "graphsage")
    with pytest.raises(adahop.InputError, match="`model` must be one of rgcn"):
        advice.advise(typed_data(), Config(), 0.002)


def test_the_command(capsys, tmp_path):
    data = typed_data()
    hetero = data.graph.to_data()
    for kind, x in data.x.tables.items():
        hetero[kind].x = x
    hetero["paper"].y = data.y[:40]
    torch.save(hetero, tmp_path / "typed.pt")
    args = ("--epochs", "1", "--hidden", "8", "--nodes", "16", "--repeats", "2", "--json", "--out", str(tmp_path / "o"))
    where = ("variance", "--dataset", str(tmp_path / "typed.pt"), "--methods", "adahop")
    code, out, err = command(capsys, *where, "--model", "hgt", *args)
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert list(rows[0])[:4] == ["method", "layer", "relation", "variance"] and "cites" in err
    assert [tuple(row["relation"]) for row in rows] == 2 * [RELATIONS[r] for r in INTO["paper"]]
    code, out, err = command(capsys, *where, *args)
    assert code == 2 and out == "" and "`model` must be one of rgcn, rgat, hgt" in err
