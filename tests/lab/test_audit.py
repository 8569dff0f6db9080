"""The audit of PyG's layers, on a few of them and few batches; the table in the docs is of all."""

from __future__ import annotations

import pytest
import torch

from adahop_lab import audit
from adahop_lab.audit import Result, cases, table

FEW = ("GCNConv, edge_weight", "SAGEConv", "GATConv, edge_attr", "PDNConv", "EdgeConv", "RGCNConv", "GCN, 2 layers")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEW)
def test_a_layer_is_what_it_was(name):
    """4 standard errors: by chance once in 30,000, over all cases of the audit a family-wise error under 1 %."""
    case = next(c for c in cases() if c.name == name)
    result = audit.audit(case, rounds=20)
    assert result.holds and result.snapshot < 1e-4
    assert result.scaled == (name != "EdgeConv")


def test_the_audit_sees_a_breach():
    good = Result("a", "sum", True, True, 1e-7, 1e-7, 0.5, 0.1, 0.2, 0.01)
    assert good.holds and not good._replace(all_neighbours=1e-3).holds and not good._replace(bias=0.3).holds
    assert not good._replace(scaled=False, all_neighbours=0.1).holds
    assert "| `a` | sum | 1e-07 | 0.500 | 0.100 | 0.200 | 0.010 |" in table([good])


def test_names_occur_once():
    names = [c.name for c in cases()]
    assert len(set(names)) == len(names) and len(names) >= 60 and torch.is_tensor(audit.graph().x)
