"""lab/benchmarks/backward.py: the forms of the gradient agree where they must."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import adahop

FILE = Path(__file__).parents[2] / "lab" / "benchmarks" / "backward.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("backward", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def halves(script):
    data = adahop.load("planted:300,6000,8,3,signal=0.5")
    made, adam = script.begun(data, 2, 0.01, 1, 0)
    script.epoch(made, adam, "plain")
    made.anchor()
    return made


def test_where_nothing_has_moved_svrg_is_the_whole_gradient(script, halves):
    want = script.flat(halves.exact(halves.train))
    for nodes in halves.train.split(100)[:2]:
        assert torch.allclose(script.flat(halves.svrg(nodes)), want, rtol=1e-4, atol=1e-7)
    assert not torch.allclose(script.flat(halves.plain(nodes)), want, rtol=0.01)


@pytest.mark.parametrize("form", ["plain", "svrg", "stored"])
def test_every_form_is_unbiased_at_the_snapshot(script, halves, form):
    """400 draws along 20 random directions: 4.5 standard errors each; the forward pass is exact there, so no bias."""
    want = script.flat(halves.exact(halves.train))
    gen = torch.Generator().manual_seed(1)
    along = torch.randn(want.numel(), 20, generator=gen, dtype=torch.double)
    found = []
    for _ in range(400):
        nodes = halves.train[torch.randperm(halves.train.numel(), generator=gen)[:100]]
        found.append((script.flat(halves.forms[form](nodes)) - want) @ along)
    gap = torch.stack(found)
    error = gap.std(0) / len(gap) ** 0.5
    assert (gap.mean(0).abs() <= 4.5 * error + 1e-6 * (want @ along).abs() + 1e-9).all()
