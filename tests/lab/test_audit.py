"""The audit of PyG's layers: every layer with every neighbour, some of them in few batches; the docs have all."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch_geometric.nn as pyg

from adahop_lab import audit
from adahop_lab.audit import NOT_TRIED, Bias, Case, LayerResult, cases, page, typed_cases

CASES = {case.name: case for case in cases()}
FEW = (
    "GCNConv, edge_weight", "SAGEConv", "GATConv, edge_attr", "PDNConv, edge_attr", "EdgeConv", "RGCNConv", "RGATConv",
    "WLConvContinuous, edge_weight", "GIN, 2 layers", "own: softmax attention", "own: a mean, then a maximum",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEW)
def test_a_layer_keeps_what_is_promised(name):
    """Bounds hold for all layers, both estimators and plain PyG together with probability .99."""
    result = audit.audit(CASES[name], 100)
    assert result.breaches == [] and result.scaled == (name != "EdgeConv")


@pytest.mark.filterwarnings("ignore")
def test_every_layer_with_every_neighbour():
    results = [audit.exactly(case) for case in CASES.values()]
    assert {r.name: r.breaches for r in results if not r.holds} == {}
    assert sum(r.scaled for r in results) >= 0.8 * len(results)


@pytest.mark.filterwarnings("ignore")
def test_typed_models_with_every_neighbour():
    results = [audit.exactly(case) for case in typed_cases()]
    assert {r.name: r.breaches for r in results if not r.holds} == {}
    assert [r.name for r in results if not r.scaled] == ["FastRGCNConv"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["to_hetero(SAGEConv), 2 layers", "RGCNConv", "HGTConv"])
def test_typed_models_keep_what_is_promised(name):
    """Bounds hold for all typed models together with probability .99."""
    result = audit.audit(next(case for case in typed_cases() if case.name == name), 100)
    assert result.breaches == [] and f"`{name}`" in audit.typed_page([result], 100)


def test_a_layer_that_depends_on_the_batch_is_held_to_the_plain_layer():
    assert RESULT._replace(of_batch=True, exact_snapshot=0.4).holds
    assert not RESULT._replace(of_batch=True, exact_snapshot=0.6).holds
    assert not RESULT._replace(of_batch=True, exact=0.4).holds


def test_every_layer_of_pyg_is_tried_or_named():
    kinds = {n for n, k in vars(pyg).items() if inspect.isclass(k) and issubclass(k, pyg.MessagePassing)}
    tried = {name.split("(")[0].split(",")[0] for name in CASES}
    assert kinds - {"MessagePassing"} <= tried | NOT_TRIED.keys() and not tried & NOT_TRIED.keys()
    assert {"GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN"} <= tried
    assert len(CASES) == len(cases()) >= 90  # names occur once


GOOD = Bias(0.1, 0.0, 0.2)
RESULT = LayerResult("GCNConv", "sum", True, False, 1e-7, 2e-7, 0.5, GOOD, GOOD, Bias(0.2, 0.1, 0.3))


@pytest.mark.parametrize(
    "change",
    [{"exact": 1e-3}, {"exact_snapshot": 1e-3}, {"bias": Bias(0.5, 0.4, 0.6)}, {"bias_snapshot": Bias(0.5, 0.4, 0.6)},
     {"exact": float("nan")}, {"scaled": False, "exact": 0.1}, {"estimated": True, "exact": 0.3}],
)  # fmt: skip
def test_the_audit_sees_a_breach(change):
    assert RESULT.holds and RESULT._replace(estimated=True, exact=0.2).holds
    broken = RESULT._replace(**change)
    assert len(broken.breaches) == 1 and broken.breaches[0] in page([broken], 100)
    assert "| `GCNConv` | sum | 1e-07 | 2e-07 | 0.50 | 0.10 (0.00–0.20) |" in page([RESULT], 100)


def test_bounds_of_a_bias():
    """A mean that is off by .3 of the length: found within its bounds, and these exclude 0."""
    g = torch.Generator().manual_seed(0)
    whole, apart = torch.randn(40, generator=g), torch.randn(40, generator=g)
    off = whole + 0.3 * apart * whole.norm() / apart.norm()
    seen = [audit.bias(mean + torch.randn(400, 40, generator=g), whole, 1e-4) for mean in (off, whole)]
    assert 0 < seen[0].low < 0.3 < seen[0].high and abs(seen[0].value - 0.3) < 0.05
    assert seen[1].low == 0 <= seen[1].value < seen[1].high < 0.15


@pytest.mark.filterwarnings("ignore")
def test_the_audit_sees_a_layer_that_is_scaled_wrongly(monkeypatch):
    """Were a mean taken for a sum, and a snapshot used where sums are divided afterwards, the audit would say so."""
    from adahop.pyg import probe

    right = probe.reading_of
    monkeypatch.setattr(probe, "reading_of", lambda *args: right(*args)._replace(factor="sum"))
    case = CASES["SAGEConv"]
    assert "bias" in " ".join(audit.audit(case, 100).breaches)

    class Divides(pyg.SAGEConv):
        """Its sums, divided by a count of its own."""

        def forward(self, x, edge_index):
            out = self.propagate(edge_index, x=(x, x), size=None)
            return self.lin_l(out / torch.bincount(edge_index[1], minlength=len(x)).clamp(min=1)[:, None])

    monkeypatch.setattr(probe, "reading_of", right)
    own = Case("own", lambda: Divides(audit.WIDTH, 4, aggr="sum"), case.call)
    assert audit.audit(own, 100).holds
    monkeypatch.setattr(probe, "reading_of", lambda *args: right(*args)._replace(sums_match=True))
    assert "snapshot" in " ".join(audit.audit(own, 100).breaches)
