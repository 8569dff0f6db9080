"""Diagnostics: measured variances against formulae, the oracle, and that measuring leaves no trace."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import adahop
from adahop import models, ops
from adahop.checks import InputError
from adahop.diagnostics import Probe, Truth, gradient_variance, measure, probe_nodes, variance
from adahop.diagnostics.frozen import frozen, recorded, run, twin
from adahop.diagnostics.oracle import Oracle, oracle_weights
from adahop.graph import Graph
from adahop.messages import energy, estimate
from adahop.methods import make
from adahop.policies import Static
from adahop.samplers import NeighborSampler
from conftest import full_sum, messy_graph, star, toy_data

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))


def setup(name="gcn", layers=2, estimator="plain", data=None, seed=0, **options):
    """(model, graph, x, layers to skip): a model as it comes, on the messy graph."""
    torch.manual_seed(seed)
    x = X if data is None else data.x
    model = models.make(name, x.shape[1], 8, 3, layers=layers, **options)
    graph = (messy_graph() if data is None else data.graph).normalized(*model.graph)
    return model, graph, x, model.remember(estimator, graph, x)


def measured(model, sampler, x, nodes, repeats=1, layers=None):
    with frozen(model):
        return measure(model, sampler, x, Truth(model, sampler.graph, x, nodes), repeats, layers)


def lonely(n: int = 12):
    """(model, graph, x): one layer on stars whose h is x itself."""
    graph = star(n, 3).normalized("row")
    x = torch.randn(n + 3, 5, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.2, 3, n + 3)[:, None]
    torch.manual_seed(0)
    return models.make("gcn", 5, 5, 5, layers=1, arch="plain"), graph, x


def messages(graph: Graph, x: torch.Tensor, hub: int):
    """a h of the true neighbours of a hub."""
    part = slice(int(graph.first[hub]), int(graph.indptr[hub + 1]))
    return (graph.weight[part, None] * x[graph.indices[part].long()]).double()


# --- the truth -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "geniepath"])
@pytest.mark.parametrize("arch", ["plain", "residual"])
def test_everyone_drawn_is_the_truth(name, arch):
    model, g, x, _ = setup(name, arch=arch)
    for row in measured(model, NeighborSampler(g, [-1, -1]), x, torch.arange(60)):
        assert row.variance < 1e-9 and row.ess is None and row.coverage == 1.0 and row.effective == 0.0


def test_truth_by_hand_and_in_chunks():
    model, g, x, _ = setup(layers=1)
    h = model.encoder(x).detach()
    nodes = torch.tensor([40, 3, 3, 59])
    truth = Truth(model, g, x, nodes)
    assert truth.nodes.tolist() == [3, 40, 59]
    assert torch.allclose(truth.sums[0, 0].double(), full_sum(g, h)[truth.nodes], atol=1e-5)
    inference, model.inference = model.inference, lambda graph, x: inference(graph, x, edges=50)
    assert torch.allclose(Truth(model, g, x, nodes).sums[0, 0], truth.sums[0, 0], atol=1e-5)


def test_truth_refuses():
    model, g, x, _ = setup(layers=1)
    with pytest.raises(InputError, match="`nodes` must name at least one node"):
        Truth(model, g, x, torch.zeros(0, dtype=torch.long))
    with pytest.raises(IndexError):
        Truth(model, g, x, [60])


# --- against formulae ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3])
def test_uniform_with_replacement_has_the_variance_of_the_book(k):
    """(1/k) (n sum |m|^2 - |sum m|^2), the target itself exact."""
    model, g, x = lonely()
    m = [messages(g, x, hub) for hub in range(3)]
    want = sum(float(len(v) * v.square().sum() - v.sum(0).square().sum()) / k for v in m) / 3
    got = measured(model, NeighborSampler(g, [k]), x, [0, 1, 2], repeats=1500)[0]
    assert abs(got.variance - want) < 5 * got.error
    effective = sum(float(len(v) * v.square().sum()) / k for v in m) / 3
    assert got.effective == pytest.approx(effective, rel=0.05)


@pytest.mark.parametrize("draw", ["systematic", "depround"])
def test_uniform_without_replacement_has_the_variance_of_the_book(draw):
    """n^2 (1 - k/n) S^2 / k of simple random sampling."""
    model, g, x = lonely()
    n, k = 12, 4
    spread = [float((v - v.mean(0)).square().sum()) / (n - 1) for v in (messages(g, x, hub) for hub in range(3))]
    want = sum(n * n * (1 - k / n) * s / k for s in spread) / 3
    got = measured(model, NeighborSampler(g, [k], None, draw), x, [0, 1, 2], repeats=1500)[0]
    assert abs(got.variance - want) < 5 * got.error


@pytest.mark.parametrize("draw", list(ops.DRAWS))
def test_no_variance_where_everyone_comes(draw):
    model, g, x = lonely()
    got = measured(model, NeighborSampler(g, [12], None, draw), x, [0, 1, 2], repeats=3)[0]
    assert got.variance < 1e-10 and got.error < 1e-10 and got.coverage == 1.0


def test_poisson_has_the_variance_of_the_book():
    """sum |m|^2 (1 - pi) / pi."""
    model, g, x = lonely()
    want = sum(float(messages(g, x, hub).square().sum()) * (1 - 1 / 3) * 3 for hub in range(3)) / 3
    got = measured(model, NeighborSampler(g, [4], None, "poisson"), x, [0, 1, 2], repeats=1500)[0]
    assert abs(got.variance - want) < 5 * got.error


# --- the oracle ----------------------------------------------------------------------------------------------------


def test_oracle_weights_by_hand():
    model, g, x = lonely()
    with frozen(model):
        truth = Truth(model, g, x, [0])
        weight = oracle_weights(model, NeighborSampler(g, [2]), x, truth, 0, 1)
    part = slice(int(g.first[0]), int(g.indptr[1]))
    assert torch.allclose(weight[part].double(), messages(g, x, 0).norm(dim=1), atol=1e-6)
    assert not weight[int(g.indptr[1]) :].any(), "only the edges of the nodes"


@pytest.mark.parametrize("draw", ["multinomial", "systematic"])
def test_the_oracle_is_best_and_its_own_equal(draw):
    model, g, x = lonely()
    data = toy_like(g, x)
    best = (g.weight * x.norm(dim=1)[g.indices.long()]).clone()
    user = torch.empty_like(best)
    user[g.eid.long()] = best
    sampler = NeighborSampler(g, [3], Static(g, 1, user), draw)
    row = variance(model, sampler, data, nodes=[0, 1, 2], repeats=600, gradient=False)[0]
    # without replacement the variance also depends on the order of a row, which prefix sums keep and a scan shuffles
    assert row["over_oracle"] == pytest.approx(1.0, abs=0.2 if draw == "systematic" else 0.09)
    assert row["effective_over_oracle"] == pytest.approx(1.0, abs=0.02)
    assert row["over_uniform"] < 0.9
    even = variance(model, NeighborSampler(g, [3], None, draw), data, nodes=[0, 1, 2], repeats=600, gradient=False)[0]
    assert even["over_oracle"] > 1.1
    if draw == "multinomial":
        assert even["over_uniform"] == pytest.approx(1.0, abs=0.09)


def test_the_oracle_knows_of_the_noise_below():
    """In a second layer it is a sqrt(E|h|^2) over what is drawn below, not a |h|."""
    model, g, x, _ = setup()
    sampler = NeighborSampler(g, [1, 2])
    with frozen(model):
        truth = Truth(model, g, x, [3])
        noisy = oracle_weights(model, twin(sampler, 0), x, truth, 1, 300)
        still = oracle_weights(model, twin(NeighborSampler(g, [-1, 2]), 0), x, truth, 1, 1)
    # average the layer's own energies from plain runs
    total = torch.zeros(g.num_edges)
    everyone = NeighborSampler(g, [1, -1], seed=5)
    with torch.no_grad(), frozen(model), recorded(model) as heard:
        for _ in range(300):
            blocks = everyone.sample([3])
            run(model, x, blocks)
            total[blocks[1].pos] += energy(heard[1])
    # `noisy` is the root of a sum over 300 draws
    assert torch.allclose(noisy, total.sqrt(), rtol=0.08, atol=1e-3)
    assert not torch.allclose(noisy / 300**0.5, still, rtol=0.02)


def test_oracle_leaves_the_other_layers_to_the_policy():
    g = messy_graph().normalized("row")
    inner = make("bs", g, [2, 2]).policy
    policy = Oracle(inner, 1, torch.ones(g.num_edges))
    assert policy.odds(0).eta == inner.eta > 0 == policy.odds(1).eta
    thanos = make("thanos", g, [2, 2])
    policy = Oracle(thanos.policy, 1, None)
    drawn = ops.Drawn(torch.tensor([0, 1]), g.first[3:4] + 0, torch.ones(1), torch.full((1,), 7.0))
    policy.odds(1)
    assert policy.scaled(g.rows(torch.tensor([3])), drawn) is drawn
    policy.odds(0)
    assert float(policy.scaled(g.rows(torch.tensor([3])), drawn).scale) != 7.0


def toy_like(graph, x):
    data = toy_data()
    data.graph, data.x, data.y = graph, x, torch.zeros(len(x), dtype=torch.long)
    data.train_mask = torch.ones(len(x), dtype=torch.bool)
    return data


# --- memories ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
@pytest.mark.parametrize("arch", ["plain", "residual"])
@pytest.mark.parametrize("estimator", ["history", "snapshot", "exact+history"])
def test_no_variance_when_memory_is_todays(name, arch, estimator):
    model, g, x, skip = setup(name, estimator=estimator, arch=arch)
    sampler = NeighborSampler(g, [1, 1])
    sampler.skip = skip
    rows = variance(model, sampler, toy_like(g, x), nodes=range(0, 60, 2), repeats=3)
    for row in rows:
        assert row["variance"] < 1e-8 and row["over_uniform"] < 1e-5 and row["over_oracle"] == 1.0
    if skip:
        assert rows[0]["coverage"] == 1.0 and rows[0]["ess"] is None


def test_an_old_memory_leaves_the_variance_of_what_changed():
    model, g, x, _ = setup("gcn", layers=1, estimator="history", arch="plain")
    memory = model.memories["0"].history
    old = x + 0.1 * torch.randn(60, 6, generator=torch.Generator().manual_seed(4))
    memory.value.copy_(old)
    row = variance(model, NeighborSampler(g, [2]), toy_like(g, x), nodes=[3], repeats=1500, gradient=False)[0]
    m = messages(g, x - old, 3)
    want = float(len(m) * m.square().sum() - m.sum(0).square().sum()) / 2
    assert abs(row["variance"] - want) < 5 * row["error"]
    m = messages(g, x, 3)
    plain = float(len(m) * m.square().sum() - m.sum(0).square().sum()) / 2
    assert row["over_uniform"] == pytest.approx(want / plain, rel=0.15), "both summed before the map"


def test_estimates_before_and_after_the_map():
    """A narrow layer sums W h; beside a memory, which sums h, the plain estimate must too."""
    model, g, x, _ = setup("gcn", layers=1, arch="plain", seed=1)
    block = NeighborSampler(g, [2]).sample([3, 4])
    sums = []
    for mapped in (True, False):
        with torch.no_grad(), recorded(model) as heard:
            run(model, x, block)
            sums.append(estimate(heard[0], mapped))
    assert sums[0].shape == (2, 3) and sums[1].shape == (2, 6)
    assert torch.allclose(sums[1] @ model.convs[0].linear.weight.t(), sums[0], atol=1e-5)


# --- effective sample size and coverage ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["graphsage", "bs", "bs.m", "labor", "ladies"])
def test_bounds(method):
    model, g, x, _ = setup()
    sizes = [6, 6] if method == "ladies" else [3, 3]
    for row in variance(model, make(method, g, sizes), toy_like(g, x), nodes=range(8), repeats=5):
        assert row["ess"] >= 1.0 and 0.0 < row["coverage"] <= 1.0 and row["variance"] > 0
        assert row["ess"] <= 3.0001 or method in ("labor", "ladies")
        assert (row["over_oracle"] is None) == (method == "ladies")
        assert row["over_uniform"] > 0 and row["gradient_variance"] > 0
        json.dumps(row)


def test_ess_counts_a_neighbour_once():
    g = star(2, 1)
    model = models.make("gcn", 1, 1, 1, layers=1, arch="plain")
    row = measured(model, NeighborSampler(g, [1]), torch.ones(3, 1), [0], 50)[0]
    assert row.ess == 1.0 and row.coverage == 1.0
    g = star(4, 1)
    row = measured(model, NeighborSampler(g, [2]), torch.ones(5, 1), [0], 2000)[0]
    assert row.ess == pytest.approx(1 * 1 / 4 + 2 * 3 / 4, abs=0.05), "both draws agree a quarter of the time"
    row = measured(model, NeighborSampler(g, [2], None, "systematic"), torch.ones(5, 1), [0], 20)[0]
    assert row.ess == pytest.approx(2.0)


def test_coverage_grows_with_the_draws():
    model, g, x, _ = setup(layers=1)
    one, many = (measured(model, NeighborSampler(g, [1]), x, [3], r)[0].coverage for r in (1, 30))
    assert one == pytest.approx(1 / int(g.indptr[4] - g.first[3])) and many > 0.15


# --- the gradient --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_gradient_of_all_neighbours_has_no_variance(name):
    data = toy_data()
    model, g, _, _ = setup(name, data=data, dropout=0.5)
    assert gradient_variance(model, NeighborSampler(g, [-1, -1]), data, data.train_mask, 2) < 1e-10
    rough, fine = (gradient_variance(model, NeighborSampler(g, [k, k]), data, range(64), 20) for k in (1, 5))
    assert rough > 1.5 * fine > 0
    assert all(p.grad is None for p in model.parameters())


# --- no trace ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["bs", "s-gcn", "as-gcn"])
def test_measuring_leaves_no_trace(method):
    data = toy_data()
    sizes = (40, 40) if method == "as-gcn" else (2, 2)
    fields = {"method": method, "sizes": sizes, "epochs": 2, "hidden": 8, "batch_size": 32, "dropout": 0.3}
    plain = adahop.fit(data, **fields)
    probe = Probe(data, every=2, against=("uniform", "oracle"), gradient=True, nodes=16, repeats=2)
    watched = adahop.fit(data, probe=probe, **fields)
    assert [h["loss"] for h in plain.history] == [h["loss"] for h in watched.history]
    assert watched.model.training == plain.model.training
    for a, b in ((plain.model, watched.model), (plain.sampler, watched.sampler)):
        one, two = a.state_dict(), b.state_dict()
        assert all(torch.equal(one[k], two[k]) for k in one)
    assert {row["step"] for row in probe.rows} == set(range(2, plain.steps + 1, 2))
    assert not any(conv.listeners for conv in watched.model.convs)


def test_measuring_is_deterministic_and_seeded():
    model, g, x, _ = setup()
    data, sampler = toy_like(g, x), make("bs.m", g, [2, 2])
    state = copy.deepcopy(sampler.state_dict())
    one, two, other = (variance(model, sampler, data, nodes=range(20), repeats=3, seed=s) for s in (0, 0, 1))
    assert one == two and one != other
    assert all(torch.equal(state[k], v) for k, v in sampler.state_dict().items())
    sampler.sample([3])
    assert variance(model, sampler, data, nodes=range(20), repeats=3) == one, "whatever the sampler drew before"


def test_a_failure_closes_the_ears():
    model, g, x, _ = setup()
    with pytest.raises(IndexError), frozen(model, plain=True), recorded(model):
        run(model, x[:1], NeighborSampler(g, [2, 2]).sample([3, 4]))
    assert not any(conv.listeners for conv in model.convs) and model.training


def test_refusals():
    data = toy_data()
    model, g, _, _ = setup(data=data)
    with pytest.raises(InputError, match="`sampler` must be node-wise or layer-wise, got ClusterGCN"):
        variance(model, make("cluster-gcn", g, [-1, -1], parts=3), data)
    with pytest.raises(InputError, match=r"`model` must be one of adahop\.models, got Linear"):
        variance(torch.nn.Linear(2, 2), NeighborSampler(g, [2]), data)
    with pytest.raises(InputError, match="`repeats`"):
        variance(model, NeighborSampler(g, [2, 2]), data, repeats=0)
    assert model.training


def test_probe_nodes():
    data = toy_data()
    nodes = probe_nodes(data, 10, 3)
    assert len(nodes) == 10 and bool(data.train_mask[nodes].all()) and torch.equal(nodes, probe_nodes(data, 10, 3))


# --- commands --------------------------------------------------------------------------------------------


def command(capsys, *args: str) -> tuple[int, str, str]:
    from adahop.cli import main

    with pytest.raises(SystemExit) as leave:
        main(list(args))
    return leave.value.code, *capsys.readouterr()


def test_command(capsys, tmp_path):
    methods = "graphsage,s-gcn,graphsage:policy=tracked:draw=systematic,ladies"
    code, out, err = command(
        capsys, "variance", "--dataset", "synthetic:200,2000,8,3", "--methods", methods, "--ks", "1,2", "--epochs", "1",
        "--hidden", "8", "--batch-size", "32", "--nodes", "32", "--repeats", "4", "--out", str(tmp_path), "--json",
    )  # fmt: skip
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert len(rows) == 4 * 2 * 2
    promised = ["method", "layer", "variance", "over_uniform", "over_oracle", "ess", "gradient_variance"]
    assert all(list(row)[:7] == promised and {"coverage", "k", "seed"} <= set(row) for row in rows)
    assert list(dict.fromkeys(row["method"] for row in rows)) == methods.split(",")
    assert {row["k"] for row in rows if row["method"] == "ladies"} == {32, 64}
    exact = [row for row in rows if row["method"] == "s-gcn" and row["layer"] == 1]
    assert all(row["over_uniform"] < 1e-8 for row in exact)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {
        "variance.jsonl",
        "training.jsonl",
        *(f"variance-{a}.{b}" for a in ("k", "training") for b in ("png", "svg")),
    }


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--methods", "graphsaint"), "node-wise or layer-wise"),
        (("--methods", "nobody"), "methods"),
        (("--methods", ","), "`methods` must be names"),
        (("--methods", "bs:eta"), "must be name=value"),
        (("--methods", "graphsage:policy=nobody"), "`policy`"),
        (("--nodes", "0"), "`nodes`"),
        (("--repeats", "0"), "`repeats`"),
        (("--ks", "1,x"), "`ks`"),
    ],
)
def test_command_refuses(capsys, flags, words):
    code, out, err = command(capsys, "variance", "--epochs", "1", *flags)
    assert code == 2 and out == "" and words in err and err.count("\n") == 1


def test_log_variance(capsys, tmp_path):
    args = ("train", "--epochs", "1", "--hidden", "8", "--sizes", "2,2", "--log-variance", "2")
    code, _, err = command(capsys, *args, "--out", str(tmp_path))
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["layer"]) for row in rows if "step" in row] == [(2, 1), (2, 2), (4, 1), (4, 2)]
    code, _, err = command(capsys, *args)
    assert code == 0 and "step 4 layer 2 variance" in err
    code, _, err = command(capsys, *args[:-1], "-1")
    assert code == 2 and "`log_variance`" in err
