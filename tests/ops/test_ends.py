"""Scores of attention on the CPU: both ends of an edge added up, and their softmax, are the reference's."""

from __future__ import annotations

import pytest
import torch

from adahop import ops


def given(heads: int = 3):
    g = torch.Generator().manual_seed(heads)
    ptr = torch.tensor([0, 4, 4, 9, 200])  # one target has no edges
    dst = torch.repeat_interleave(torch.arange(4), ptr.diff())
    src = torch.randint(30, (200,), generator=g)
    s, t = (torch.randn(n, heads, generator=g).requires_grad_() for n in (4, 30))
    return s, t, src, dst, ptr, torch.rand(200, generator=g) + 0.5


@pytest.mark.parametrize("heads", [1, 3, 16])
def test_added_ends_and_their_gradients(heads):
    s, t, src, dst, _, _ = given(heads)
    weigh = torch.randn(200, heads, generator=torch.Generator().manual_seed(1))
    found = []
    for form in ("cpu", "reference"):
        out = getattr(ops.add_ends, form)(s, t, src, dst)
        one = torch.autograd.grad((out.square() * weigh).sum(), (s, t), create_graph=True)
        two = torch.autograd.grad(sum(g.pow(3).sum() for g in one), (s, t))
        out = getattr(ops.add_ends, form)(s, t, src, dst)
        found.append((out, *torch.autograd.grad((out * weigh).sum(), (s, t), retain_graph=True), *one, *two))
    assert type(found[0][0].grad_fn).__name__ != type(found[1][0].grad_fn).__name__
    assert all(torch.allclose(a, b, atol=1e-3, rtol=1e-4) for a, b in zip(*found, strict=True))


def test_one_end_alone_may_need_a_gradient():
    s, t, src, dst, _, _ = given()
    ops.add_ends(s.detach(), t, src, dst).sum().backward()
    assert s.grad is None and torch.equal(t.grad, torch.bincount(src, minlength=30).float().unsqueeze(1).expand(30, 3))


@pytest.mark.parametrize("by_edge", [False, True])
def test_attention_of_ends(by_edge):
    s, t, src, dst, ptr, scale = given()
    t = torch.randn(200, 3, generator=torch.Generator().manual_seed(2)).requires_grad_() if by_edge else t
    weigh = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
    found = []
    for form in ("cpu", "reference"):
        out = getattr(ops.attend, form)(s, t, src, dst, ptr, scale, 0.2, 0, by_edge)
        found.append((out, *torch.autograd.grad((out * weigh).sum(), (s, t))))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))
    assert ops.add_ends.cpu(s.double(), t.double(), src, dst) is NotImplemented


@pytest.mark.parametrize("width", [1, 10, 16])
@pytest.mark.parametrize("heads", [1, 4])
def test_sums_of_the_same_rows_for_every_head(heads, width):
    _, _, src, dst, ptr, _ = given()
    g = torch.Generator().manual_seed(width)
    h, coef = (
        torch.randn(30, width, generator=g).requires_grad_(),
        torch.randn(200, heads, generator=g).requires_grad_(),
    )
    weigh, found = torch.randn(4, heads, width, generator=g), []
    for form in ("cpu", "reference"):
        make = getattr(ops.gather_heads, form)
        one = torch.autograd.grad((make(h, src, dst, coef, ptr).square() * weigh).sum(), (h, coef), create_graph=True)
        two = torch.autograd.grad(sum(g.square().sum() for g in one), (h, coef))
        out = make(h, src, dst, coef, ptr)
        found.append((out, *torch.autograd.grad((out * weigh).sum(), (h, coef)), *one, *two))
    assert all(float((a - b).abs().max() / b.abs().max()) < 1e-5 for a, b in zip(*found, strict=True))
    with ops.threads(2):
        again = ops.gather_heads(h, src, dst, coef, ptr)
    assert torch.equal(again, found[0][0])
