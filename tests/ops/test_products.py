"""Products by oneDNN: values and gradients are torch's own, for any number of rows, and a gradient has one, too."""

from __future__ import annotations

import pytest
import torch

from adahop import ops
from adahop.ops import products


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Every product that oneDNN serves goes to it, on any processor that has it."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("torch without oneDNN")
    monkeypatch.setattr(products, "SMALL", 0)
    monkeypatch.setattr(products, "LARGE", 4000)
    monkeypatch.setattr(products, "halved", lambda: True)


def given(rows: int, bias: str, requires: bool = True):
    g = torch.Generator().manual_seed(rows)
    shapes = {"none": None, "shared": (7,), "by row": (rows, 7)}
    made = [torch.randn(rows, 5, generator=g), torch.randn(7, 5, generator=g)]
    made += [] if shapes[bias] is None else [torch.randn(shapes[bias], generator=g)]
    return [t.requires_grad_(requires) for t in made]


@pytest.mark.parametrize("rows", [128, 129, 300, 640, 1000])
@pytest.mark.parametrize("bias", ["none", "shared", "by row"])
def test_values_and_gradients(rows, bias):
    one, two = given(rows, bias), given(rows, bias)
    ours, theirs = ops.product(*one), products.plain(*two)
    assert type(ours.grad_fn).__name__ != type(theirs.grad_fn).__name__, "oneDNN was not asked"
    assert ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-5)
    weigh = torch.randn(7, rows, generator=torch.Generator().manual_seed(1)).t()  # a gradient that is not contiguous
    for out in (ours, theirs):
        (out * weigh).sum().backward()
    for a, b in zip(one, two, strict=True):
        assert a.grad.is_contiguous() and torch.allclose(a.grad, b.grad, atol=2e-4)


def test_a_gradient_of_the_gradient():
    ends = []
    for form in (ops.product, products.plain):
        h, weight, bias = given(200, "shared")
        (dh,) = torch.autograd.grad(form(h, weight, bias).square().sum(), h, create_graph=True)
        ends.append(torch.autograd.grad(dh.square().sum(), weight)[0])
    assert torch.allclose(*ends, rtol=1e-4)


def test_what_it_does_not_serve_is_torchs(monkeypatch):
    h, weight, bias = given(200, "shared", requires=False)
    assert products.wide_product(h[:100], weight, bias) is NotImplemented  # few rows
    assert products.wide_product(h.double(), weight.double()) is NotImplemented
    assert products.wide_product(h.unsqueeze(0), weight) is NotImplemented
    monkeypatch.setattr(products, "halved", lambda: False)
    assert products.wide_product(h, weight, bias) is NotImplemented
    assert torch.equal(ops.product(h, weight, bias), torch.nn.functional.linear(h, weight, bias))
