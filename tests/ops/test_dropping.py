"""Dropout and noise: kernels draw the bits that they say, shares and variances are right, entries are independent."""

from __future__ import annotations

import pytest
import torch

from adahop import ops
from adahop.ops import random


def seeded(make, *args):
    torch.manual_seed(3)
    return make(*args)


def bits(x):
    """The 32 bits of every entry, in plain torch."""
    torch.manual_seed(3)
    key = int(torch.empty((), dtype=torch.long).random_())
    return random.short(key, torch.arange(x.numel())).view(x.shape)


def plain_dropout(x, share):
    return torch.where(bits(x) < round((1 - share) * 2**32), x * (1 / (1 - share)), 0.0)


def plain_noisy(x, size, by):
    heads = sum((bits(x) >> at) & 1 for at in range(32))
    return x + size * (by / 8**0.5 * (heads - 16)).float()


@pytest.mark.parametrize("share", [1e-12, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (7, 5), (300, 33), (4, 6, 8)])
def test_dropout_and_its_gradient_to_the_bit(share, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ours, plain = seeded(ops.dropout, x, share), plain_dropout(x, share)
    assert torch.equal(ours, plain)
    weigh = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    one, two = (torch.autograd.grad((out * weigh).sum(), x)[0] for out in (ours, plain))
    assert torch.equal(one, two)
    assert torch.equal((ours != 0), (one != 0)) and torch.equal(seeded(ops.dropout, x, share), ours)


def test_any_number_of_threads_and_any_layout_drop_the_same():
    x = torch.ones(1500, 2000)  # enough to be cut for several threads
    out = []
    for n in (1, 2, 8):
        with ops.threads(n):
            out.append(seeded(ops.dropout, x, 0.3))
            assert torch.allclose(seeded(ops.noisy, x, x, 1.5), plain_noisy(x, x, 1.5), atol=1e-6)
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])
    y = torch.randn(40, 30)
    assert torch.equal(seeded(ops.dropout, y.t(), 0.3), seeded(ops.dropout, y.t().contiguous(), 0.3))


def test_a_gradient_of_the_gradient():
    x = torch.randn(50, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(seeded(ops.dropout, x, 0.5).pow(3).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(dx.sum(), x)
    assert torch.allclose(again, 6 * x.detach() * 8 * (dx.detach() != 0))


def test_other_types_and_the_reference_are_torch_s(monkeypatch):
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.ones(64, 64, dtype=dtype)
        assert torch.equal(seeded(ops.dropout, x, 0.25), seeded(torch.nn.functional.dropout, x, 0.25))
        assert torch.equal(seeded(ops.noisy, x, x, 2.0), torch.addcmul(x, x, seeded(torch.randn_like, x), value=2.0))
    monkeypatch.setenv("ADAHOP_REFERENCE", "1")
    x = torch.ones(64, 64)
    assert torch.equal(seeded(ops.dropout, x, 0.25), seeded(torch.nn.functional.dropout, x, 0.25))


def z(found: torch.Tensor, truth: float, deviation: float, many: int) -> float:
    return abs(float(found) - truth) / (deviation / many**0.5)


@pytest.mark.parametrize("seed", range(3))
def test_entries_are_kept_independently(seed):
    """Fixed seeds; 5 standard errors: one of all these checks fails in a hundred thousand for a sound generator."""
    torch.manual_seed(seed)
    many, stay = 1 << 20, 0.7
    kept = (ops.dropout(torch.ones(1 << 13, 128), 1 - stay) > 0).double()
    assert z(kept.mean(), stay, (stay * (1 - stay)) ** 0.5, many) < 5
    flat = kept.flatten() - stay
    for lag in (1, 2, 3, 64, 127, 128, 129, 256, 1 << 12):  # neighbours in a row, in a column, in other rows
        assert z((flat[:-lag] * flat[lag:]).mean(), 0.0, stay * (1 - stay), many - lag) < 5, lag
    rows, columns = kept.sum(1), kept.sum(0)
    assert abs(float(rows.var()) / (128 * stay * (1 - stay)) - 1) < 5 * (2 / len(rows)) ** 0.5
    assert abs(float(columns.var()) / (len(rows) * stay * (1 - stay)) - 1) < 5 * (2 / len(columns)) ** 0.5
    other = (ops.dropout(torch.ones(1 << 13, 128), 1 - stay) > 0).double().flatten() - stay
    assert z((flat * other).mean(), 0.0, stay * (1 - stay), many) < 5


def test_noise_has_mean_0_and_the_size_that_was_asked_for():
    torch.manual_seed(0)
    x, size, many = torch.zeros(1 << 12, 256), torch.full((1 << 12, 256), 3.0), 1 << 20
    e = ops.noisy(x, size, 0.5).double() / 1.5
    assert z(e.mean(), 0.0, 1.0, many) < 5 and z(e.square().mean(), 1.0, 2**0.5, many) < 5
    assert abs(float(e.pow(3).mean())) < 0.02 and 2.9 < float(e.pow(4).mean()) < 3.0  # of 32 tosses: 2.94
    assert float(e.abs().max()) > 4
