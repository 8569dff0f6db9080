"""Training with 1, 2 and 8 threads: what is equal to the last bit, and the one place where torch's sums are not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

import adahop
from adahop import ops
from adahop.train import fit

DATA = adahop.load("synthetic:800,12000,48,5")
METHODS = [("bs", "gcn"), ("s-gcn", "gcn"), ("bs.m", "gat"), ("graphsaint", "sage"), ("as-gcn", "gcn")]
OPTIONS = {"hidden": 16, "dropout": 0.3, "seed": 1}


@contextlib.contextmanager
def torch_threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sizes(method: str) -> tuple[int, int]:
    return (200, 200) if method == "as-gcn" else (5, 5)


def end(**options) -> tuple[list[float], list[torch.Tensor]]:
    result = fit(DATA, **OPTIONS, **options)
    return [row["loss"] for row in result.history], [p.detach() for p in result.model.parameters()]


@pytest.mark.parametrize("method, model", METHODS)
def test_our_kernels_leave_the_same_run(method, model, many_threads):
    """Everything of ours is the same for any number of threads: with torch on one, runs are equal to the last bit."""
    ends = []
    for n in (1, 2, 8):
        with ops.threads(n):
            ends.append(end(method=method, model=model, sizes=sizes(method), epochs=2, batch_size=128))
    for losses, weights in ends[1:]:
        assert losses == ends[0][0] and all(map(torch.equal, weights, ends[0][1]))


@pytest.mark.parametrize("method, model", METHODS)
def test_the_first_loss_is_the_same(method, model, many_threads):
    """Sampling, dropout and our sums do not depend on torch's threads; weights differ after a step.

    Where a first layer folds its encoder into its kernel, their product is torch's, whose last bits do depend.
    """
    losses = []
    for n in (1, 2, 8):
        with torch_threads(n):
            losses.append(end(method=method, model=model, sizes=sizes(method), epochs=1, batch_size=10_000)[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and losses[2] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("method, model", METHODS)
def test_more_steps_differ_by_rounding_alone(method, model, many_threads):
    """The gradient of a weight is one sum over all rows, which torch's BLAS may cut by threads."""
    ends = []
    for n in (1, 8):
        with torch_threads(n):
            ends.append(end(method=method, model=model, sizes=sizes(method), epochs=1, batch_size=128, lr=1e-3))
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-2)


def test_data_sets_do_not_depend_on_threads():
    hashes = set()
    for n in (1, 2, 8):
        with torch_threads(n):
            hashes.add(adahop.load("digits").graph.hash())
    assert len(hashes) == 1
