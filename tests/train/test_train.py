"""fit: one seed, one run; the best checkpoint; metrics against sklearn."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch_geometric.data import Data

import adahop
from adahop import metrics
from adahop.checks import InputError
from adahop.methods import METHODS
from adahop.train import Config, evaluate, fit, train_step
from conftest import toy_data

FAST = {"sizes": (3, 3), "hidden": 8, "epochs": 3, "batch_size": 32}


def road(result) -> list[dict]:
    """The history without what a clock decides."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in result.history]


def same_model(a, b) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def size_for(method: str) -> dict:
    family = METHODS[method].family
    return {**FAST, "sizes": (20, 20) if family == "layer-wise" else (3, 3)}


# --- one seed, one run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("method", METHODS)
def test_equal_seeds_give_equal_runs_alone_or_after_others(method, prefetch):
    options = {**size_for(method), "epochs": 2, "method": method, "prefetch": prefetch, "dropout": 0.3}
    torch.manual_seed(1)
    alone = fit(toy_data(), seed=3, **options)
    torch.manual_seed(2)  # neither the caller's state nor a run before may matter
    fit(toy_data(), seed=4, **{**options, "epochs": 1})
    again = fit(toy_data(), seed=3, **options)
    assert road(alone) == road(again) and same_model(alone.model, again.model)
    assert all(np.isfinite(row["loss"]) for row in alone.history)
    state, other = alone.sampler.state_dict(), again.sampler.state_dict()
    assert state.keys() == other.keys() and all(torch.equal(state[k], other[k]) for k in state)


def test_seeds_differ():
    a, b = (fit(toy_data(), seed=s, method="bs", **FAST) for s in (0, 1))
    assert road(a) != road(b) and not same_model(a.model, b.model)


def test_the_callers_random_state_is_left_alone():
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    fit(toy_data(), method="bs", dropout=0.5, **FAST)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all() and random.getstate() == before[2]


@pytest.mark.parametrize("model", ["gcn", "sage", "gat", "geniepath"])
def test_every_model_learns_the_toy(model):
    data = toy_data()
    result = fit(data, method="bs", model=model, seed=0, **{**FAST, "epochs": 12, "sizes": (4, 4)})
    most = float(torch.bincount(data.y[data.test_mask]).max() / data.test_mask.sum())
    assert result.test > most + 0.15, f"no better than the largest class, {most:.2f}"
    assert result.history[-1]["loss"] < result.history[0]["loss"]


# --- the best checkpoint -------------------------------------------------------------------------------------------


def test_the_best_checkpoint_on_validation_is_restored():
    data = toy_data()
    result = fit(data, method="bs", lr=0.3, seed=1, **{**FAST, "epochs": 8})  # a large step: the road goes up and down
    vals = [row["val"] for row in result.history]
    assert result.val == max(vals) and result.best_epoch == vals.index(max(vals)) + 1
    assert result.best_epoch < result.epochs == 8, "the last epoch was best: nothing to restore"
    assert result.test == result.history[result.best_epoch - 1]["test"]
    now = evaluate(result.model, data)
    assert now["val"] == result.val and now["test"] == result.test and now["val"] != vals[-1]


def test_early_stopping():
    result = fit(toy_data(), method="graphsage", lr=0.3, patience=2, seed=1, **{**FAST, "epochs": 50})
    assert result.epochs == result.best_epoch + 2 < 50
    assert fit(toy_data(), method="graphsage", patience=0, **FAST).epochs == 3


def test_callbacks_and_counts():
    rows, steps = [], []
    data = toy_data()
    result = fit(data, on_epoch=rows.append, on_step=steps.append, method="bs", **FAST)
    batches = -(-int(data.train_mask.sum()) // 32)
    assert result.steps == 3 * batches and steps == list(range(1, result.steps + 1))
    assert rows == result.history and [row["epoch"] for row in rows] == [1, 2, 3]
    assert {"seed", "test", "val", "best_epoch", "epochs", "steps", "seconds"} == set(result.summary())


# --- what the options do -------------------------------------------------------------------------------------------


def test_weight_decay_shrinks_and_dropout_changes():
    base = {**FAST, "method": "graphsage", "dropout": 0.0}
    plain, decayed, dropped = (
        fit(toy_data(), **{**base, **more}) for more in ({}, {"weight_decay": 0.1}, {"dropout": 0.5})
    )
    norm = [sum(float(p.detach().square().sum()) for p in r.model.parameters()) for r in (plain, decayed)]
    assert norm[1] < 0.9 * norm[0]
    assert road(dropped) != road(plain)
    assert dropped.history[-1]["loss"] > plain.history[-1]["loss"]


def test_options_override_a_config():
    config = Config(method="graphsage", **FAST)
    assert fit(toy_data(), config).epochs == 3
    assert fit(toy_data(), config, epochs=1).epochs == 1
    assert Config(**config.as_dict()) == config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "bss"}, "did you mean 'bs'"), ({"model": "gnc"}, "did you mean 'gcn'"), ({"lr": 0}, "`lr` must be"),
        ({"epochs": 0}, "`epochs` must be"), ({"sizes": (0,)}, "`sizes` must be"), ({"dropout": 1.0}, "`dropout`"),
        ({"device": "tpu"}, "`device` must be one of"), ({"epoch": 3}, "did you mean 'epochs'"),
        ({"method_options": {"memry": 1}}, "got 'memry'; did you mean 'memory'"),
        ({"arch": "plane"}, "did you mean 'plain'"),
        ({"eta": 0.2}, r"`eta` must be given as method_options={'eta': ...}"),
        ({"model": "gat", "heads": 8}, r"`heads` must be given as model_options={'heads': ...}"),
        ({"model": torch.nn.Linear(2, 2)}, "`model` must be a name like gcn, got Linear"),
    ],
)  # fmt: skip
def test_refusals(options, words):
    with pytest.raises(InputError, match=words):
        fit(toy_data(), **options)


def test_a_pyg_data_is_told_how_to_be_loaded():
    with pytest.raises(InputError, match=r"must be what `adahop.load` returns, got Data \(it takes a PyG Data\)"):
        fit(Data(x=torch.ones(2, 1)), epochs=1)


# --- the loop and evaluation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_training_teaches_and_evaluation_does_not(method):
    data = toy_data()
    result = fit(data, method=method, **{**size_for(method), "epochs": 1})
    before = {k: v.clone() for k, v in result.sampler.state_dict().items()}
    evaluate(result.model, data)
    after = result.sampler.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    fresh = adahop.make(method, result.sampler.graph, size_for(method)["sizes"], **(
        {"features": data.x} if "features" in METHODS[method].needs else {})).state_dict()  # fmt: skip
    if METHODS[method].state != "none" and any(v.numel() > 1 for v in fresh.values()):
        assert any(not torch.equal(fresh[k], after[k]) for k in fresh if fresh[k].numel() > 1), "nothing was learned"


def test_evaluation_is_exact_and_knows_no_sampler():
    data = toy_data()
    result = fit(data, method="bs", model="gat", **FAST)
    once = evaluate(result.model, data)
    assert once == evaluate(result.model, data) and set(once) == {"train", "val", "test"}
    out = result.model.inference(data.graph.normalized(*result.model.graph), data.x)
    assert once["test"] == pytest.approx(float((out.argmax(1) == data.y)[data.test_mask].float().mean()))


def test_a_step_feeds_the_energies_back():
    data = toy_data()
    model = adahop.models.make("gcn", data.x.shape[1], 8, 3)
    graph = data.graph.normalized(*model.graph)
    sampler = adahop.make("bs", graph, [3, 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = next(iter(adahop.Loader(data, sampler, data.train_mask, 32)))
    before = [p.clone() for p in model.parameters()]
    loss = train_step(model, sampler, optimizer, batch)
    assert not loss.requires_grad and all(p.grad is None for p in model.parameters())
    assert any(not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert sampler.policy.visits.sum() > 0 and (sampler.policy.log_weight[0] != 0).any()
    assert (sampler.policy.log_weight[1] != 0).any()


# --- metrics -------------------------------------------------------------------------------------------------------


def outputs(n=200, c=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, c, generator=g), torch.randint(c, (n,), generator=g), torch.randint(2, (n, c), generator=g)


def test_accuracy_and_micro_f1_of_classes():
    out, y, _ = outputs()
    out[torch.arange(100), y[:100]] += 2
    want = sk.accuracy_score(y, out.argmax(1))
    assert metrics.score("accuracy", out, y) == pytest.approx(want)
    assert metrics.score("micro-f1", out, y) == pytest.approx(sk.f1_score(y, out.argmax(1), average="micro"))


def test_micro_f1_of_labels():
    out, _, y = outputs()
    want = sk.f1_score(y.numpy(), (out > 0).int().numpy(), average="micro")
    assert metrics.score("micro-f1", out, y.float()) == pytest.approx(want)
    assert metrics.score("micro-f1", -torch.ones(3, 2), torch.zeros(3, 2)) == 0.0


def test_roc_auc():
    out, y, labels = outputs()
    out = out + labels
    want = sk.roc_auc_score(labels.numpy(), out.numpy(), average="macro")
    assert metrics.score("roc-auc", out, labels.float()) == pytest.approx(want)
    some = labels.clone()
    some[:, 1] = 0  # a label nobody has is left out of the mean
    want = np.mean([sk.roc_auc_score(labels[:, j].numpy(), out[:, j].numpy()) for j in (0, 2, 3)])
    assert metrics.score("roc-auc", out, some.float()) == pytest.approx(want)
    assert metrics.score("roc-auc", out, torch.zeros(200, 4)) == 0.5
    two = (y > 1).long()
    want = sk.roc_auc_score(two.numpy(), out[:, :2].softmax(1)[:, 1].numpy())
    assert metrics.score("roc-auc", out[:, :2], two) == pytest.approx(want)
    want = sk.roc_auc_score(y.numpy(), out.softmax(1).numpy(), multi_class="ovr")
    assert metrics.score("roc-auc", out, y) == pytest.approx(want)


def test_roc_auc_with_a_class_missing_from_a_split():
    out, y, _ = outputs()
    assert metrics.score("roc-auc", out[:, :2], torch.zeros(200, dtype=torch.long)) == 0.5
    y[y == 2] = 1
    probs = out.softmax(1).numpy()
    want = np.mean([sk.roc_auc_score((y == c).numpy(), probs[:, c]) for c in (0, 1, 3)])
    assert metrics.score("roc-auc", out, y) == pytest.approx(want)


def test_empty_sets_and_unknown_metrics():
    assert metrics.score("accuracy", torch.zeros(0, 3), torch.zeros(0, dtype=torch.long)) == 0.0
    with pytest.raises(InputError, match="did you mean 'accuracy'"):
        metrics.score("acuracy", torch.zeros(1, 3), torch.zeros(1, dtype=torch.long))


def test_criterion():
    out, y, labels = outputs()
    assert torch.allclose(metrics.criterion(out, y), torch.nn.functional.cross_entropy(out, y))
    want = torch.nn.functional.binary_cross_entropy_with_logits(out, labels.float())
    assert torch.allclose(metrics.criterion(out, labels.float()), want)
    weight = torch.rand(200)
    rows = torch.nn.functional.cross_entropy(out, y, reduction="none")
    assert torch.allclose(metrics.criterion(out, y, weight), (rows * weight).sum())


@pytest.mark.parametrize(("labels", "metric"), [("labels", "micro-f1"), ("labels", "roc-auc"), ("classes", "roc-auc")])
def test_fit_for_labels_and_metrics(labels, metric):
    data = toy_data(labels=labels, metric=metric)
    result = fit(data, method="bs", **{**FAST, "epochs": 20})
    out = result.model.inference(data.graph.normalized(*result.model.graph), data.x)[data.test_mask]
    y = data.y[data.test_mask].numpy()
    if metric == "micro-f1":
        want = sk.f1_score(y, (out > 0).int().numpy(), average="micro")
    elif labels == "labels":
        want = sk.roc_auc_score(y, out.numpy(), average="macro")
    else:
        want = sk.roc_auc_score(y, out.softmax(1).numpy(), multi_class="ovr")
    assert result.test == pytest.approx(want)
    assert result.test > 0.6


def test_fit_wants_a_known_metric():
    with pytest.raises(InputError, match="`metric` must be one of"):
        fit(SimpleNamespace(metric="loss"))


def test_without_validation_nodes_no_epoch_is_the_best():
    """The first epoch's score was reported, as the score of no nodes is 0 in every epoch."""
    data = toy_data()
    data.val_mask = torch.zeros_like(data.val_mask)
    with pytest.raises(InputError, match="`val_mask` must name at least one node, which decides the best epoch"):
        fit(data, epochs=2)
