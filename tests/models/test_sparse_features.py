"""Features that are mostly zeros: the same training, without reading the zeros."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.data import HeteroData

import adahop
from adahop import InputError
from adahop.checkpoint import Checkpoints
from adahop.config import Config
from adahop.diagnostics.advise import advise
from adahop.features import SparseFeatures, Values
from adahop.methods import METHODS
from adahop.run import Run, is_sparse, stored
from adahop.sum import ExactSparse, ExactSum

DATA = adahop.load("texts:300,1800,400,4,words=12")


def few_entries(rows: int = 40, width: int = 30) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=g) * (torch.rand(rows, width, generator=g) < 0.1)
    x[3] = x[-1] = 0.0
    return x


@pytest.mark.parametrize(
    "rows", [slice(None), slice(5, 20), torch.tensor([7, 3, 7, 39, 0]), torch.tensor([], dtype=int)]
)
def test_rows_and_products_are_those_of_the_whole_matrix(rows):
    x = few_entries()
    sparse, w, b = SparseFeatures.of(x)[rows], torch.randn(8, 30, requires_grad=True), torch.randn(8)
    assert sparse.shape == x[rows].shape and torch.equal(sparse.dense(), x[rows])
    out = sparse.product(w, b)
    assert torch.allclose(out, x[rows] @ w.t() + b, atol=1e-5)
    (own,) = torch.autograd.grad(out.square().sum(), w)
    (whole,) = torch.autograd.grad((x[rows] @ w.t() + b).square().sum(), w)
    assert torch.allclose(own, whole, atol=1e-4)


@pytest.mark.parametrize("encoded", [False, True])
def test_values_are_those_of_the_whole_matrix(encoded):
    x, encoder = few_entries(), nn.Linear(30, 6) if encoded else None
    sparse, whole = (Values(t, encoder) for t in (SparseFeatures.of(x), x))
    kernel = torch.randn(5, 6 if encoded else 30)
    for one in (
        Values.rows,
        lambda v: v.rows(7),
        lambda v: v.norms(kernel),
        lambda v: v.norms(),
        lambda v: v.dot(kernel)[0],
    ):
        assert torch.allclose(one(sparse), one(whole), atol=1e-4)


def test_dropout_keeps_the_mean_and_drops_the_share():
    x = SparseFeatures.of(few_entries(400, 100))
    value = torch.stack([x.dropped(0.25).value / x.value for _ in range(200)])
    many = value.numel()  # entries of 0 or 4/3; five standard errors: the test fails by chance once in a million seeds
    assert abs(float((value == 0).float().mean()) - 0.25) < 5 * (0.25 * 0.75 / many) ** 0.5
    assert torch.allclose(value[value > 0], torch.tensor(4 / 3))


CASES = [("adahop", "residual"), ("adahop", "plain"), ("graphsage", "residual"), ("graphsage", "plain")]
CASES += [(name, "residual") for name, m in METHODS.items() if name not in ("adahop", "graphsage", "as-gcn")]


@pytest.mark.parametrize("model", ["gcn", "sage", "gat", "gatv2", "geniepath"])
@pytest.mark.parametrize(("method", "arch"), CASES)
def test_training_is_the_same_but_for_rounding(model, method, arch):
    if model not in METHODS[method].models:
        pytest.skip(f"{method} does not train {model}")
    if method == "cluster-gcn":
        pytest.importorskip("pymetis")
    options = {"model": model, "method": method, "arch": arch, "sizes": (4, 4), "hidden": 8, "epochs": 2, "lr": 0.01}
    options |= {"estimator": "exact"} if model.startswith("ga") and method == "adahop" else {}
    ends = [
        adahop.fit(DATA, dropout=0.0, noise=0.0, features=kind, **options).history[-1] for kind in ("auto", "float32")
    ]
    assert ends[0]["loss"] == pytest.approx(ends[1]["loss"], rel=1e-3)
    assert ends[0]["val"] == pytest.approx(ends[1]["val"], abs=0.03)


@pytest.mark.parametrize("estimator", ["exact", "history", "snapshot", "exact+history"])
@pytest.mark.parametrize("arch", ["plain", "residual"])
def test_every_estimator(estimator, arch):
    options = {"estimator": estimator, "arch": arch, "method": "graphsage", "sizes": (3, 3), "hidden": 8, "epochs": 2}
    ends = [adahop.fit(DATA, dropout=0.0, features=k, **options).history[-1]["loss"] for k in ("auto", "float32")]
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)
    assert adahop.fit(DATA, dropout=0.3, **options).history[-1]["loss"] > 0


@pytest.mark.parametrize("model", ["rgcn", "rgat", "hgt"])
@pytest.mark.parametrize("method", ["adahop", "graphsage"])
def test_types_with_sparse_features(model, method):
    data = typed_texts()
    options = {"model": model, "method": method, "sizes": (3, 3), "hidden": 8, "epochs": 2, "noise": 0.0}
    ends = [adahop.fit(data, dropout=0.0, features=k, **options).history[-1]["loss"] for k in ("auto", "float32")]
    assert ends[0] == pytest.approx(ends[1], rel=2e-3)
    tables = stored(data, Config(model=model)).x.tables
    assert isinstance(tables["paper"], SparseFeatures) and torch.is_tensor(tables["venue"]) and tables["author"] is None
    assert adahop.fit(data, dropout=0.3, **options).history[-1]["loss"] > 0


def typed_texts() -> adahop.datasets.base.Dataset:
    """Papers with words, venues with a few numbers, authors without features."""
    g = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["paper"].x, data["paper"].y = DATA.x, DATA.y
    data["venue"].x, data["author"].num_nodes = torch.randn(9, 4, generator=g), 80
    for name in ("train_mask", "val_mask", "test_mask"):
        data["paper"][name] = DATA[name]
    data["paper", "cites", "paper"].edge_index = DATA.edge_index
    for source, many in (("venue", 9), ("author", 80)):
        ends = torch.randint(many, (900,), generator=g), torch.randint(300, (900,), generator=g)
        data[source, "to", "paper"].edge_index = torch.stack(ends)
        data["paper", "from", source].edge_index = torch.stack(ends[::-1])
    return adahop.load(data)


def test_no_sums_of_features_are_stored():
    sparse, whole = (Run(DATA, Config(sizes=(4, 4), features=kind), 0) for kind in ("auto", "float32"))
    assert isinstance(sparse.model.memory(0), ExactSparse) and isinstance(whole.model.memory(0), ExactSum)
    assert isinstance(sparse.data.x, SparseFeatures) and sparse.data.x.nbytes < DATA.x.nbytes / 8
    assert torch.is_tensor(DATA.x), "the user's own data stays as it is"


OTHERWISE = [{"model": "gat"}, {"method": "as-gcn", "sizes": (20, 20)}, {"partition": "range", "method": "bs"}]


@pytest.mark.parametrize("options", [*OTHERWISE, {"features": "float32"}])
def test_what_reads_features_otherwise_keeps_them_whole(options):
    assert torch.is_tensor(stored(DATA, Config(**options)).x)


def test_when_features_count_as_sparse():
    assert is_sparse(DATA.x, DATA.graph)
    assert not is_sparse(DATA.x[:, :255], DATA.graph), "narrow"
    assert not is_sparse(torch.ones_like(DATA.x), DATA.graph), "no zeros"
    assert not is_sparse(DATA.x.double(), DATA.graph)
    crowded = adahop.Graph.from_edge_index(torch.randint(300, (2, 300 * 200)), num_nodes=300)
    assert not is_sparse(DATA.x, crowded), "sums of so many neighbours' rows are faster to store"


def test_a_run_resumes_and_says_what_differs(tmp_path):
    options = {"sizes": (4, 4), "hidden": 8, "noise": 0.0, "dropout": 0.2}
    whole = adahop.fit(DATA, epochs=4, **options)

    def stop(step: int) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adahop.fit(DATA, epochs=4, checkpoint=Checkpoints(tmp_path, every=1), on_step=stop, **options)
    again = adahop.fit(DATA, epochs=4, checkpoint=tmp_path, **options)
    assert [row["loss"] for row in again.history] == [row["loss"] for row in whole.history]
    with pytest.raises(InputError, match="`features` must be 'sparse' as in the checkpoint, got 'float32'"):
        adahop.fit(DATA, epochs=4, checkpoint=tmp_path, features="float32", **options)
    with pytest.raises(InputError, match="the data's content"):
        other = adahop.load("texts:300,1800,400,4,words=12,seed=1")
        adahop.fit(other, epochs=4, checkpoint=tmp_path, **options)


def test_advice_and_some_nodes_evaluated():
    assert advise(DATA, Config(hidden=8, sizes=(2, 2)), minutes=0.02)["recommended"]["method"]
    assert adahop.fit(DATA, sizes=(3, 3), hidden=8, epochs=1, judged=20).val > 0
