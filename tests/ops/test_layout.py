"""Loops put first and weights normalised: the kernels give what plain torch does, to the bit."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from adahop import ops

from conftest import messy_graph  # isort: skip


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_normalised_weights(both, weighted, threads, monkeypatch):
    monkeypatch.setattr(import_module("adahop.ops.threads"), "SMALL", 10)
    g = messy_graph()
    given = (g.indptr, g.indices, g.weight if weighted else None, both)
    with ops.threads(threads):
        assert torch.equal(ops.normalise.cpu(*given), ops.normalise.reference(*given))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.int64, torch.float64, torch.float16])
def test_what_comes_first_in_a_row(dtype):
    g = messy_graph()
    values, own = torch.arange(g.num_edges).to(dtype), -torch.arange(g.num_nodes).to(dtype)
    got = ops.prepend(values, g.indptr, own)
    want = [torch.cat([own[i : i + 1], values[g.indptr[i] : g.indptr[i + 1]]]) for i in range(g.num_nodes)]
    assert got.dtype == dtype and torch.equal(got, torch.cat(want))
    assert torch.equal(got, ops.prepend.reference(values, g.indptr, own))
