"""Batches stay what they are, to the bit, for any number of threads: against the committed fingerprints."""

from __future__ import annotations

import pytest
import torch

from adahop import METHODS, ops
from fingerprints import PYG, cpu, entries, graphs, kept, same

NAMES = [
    f"{what} {where}"
    for where in ("messy", "rmat", "digits")
    for what in (
        *METHODS,
        *(f"loader {m} prefetch {p}" for m in ("graphsage", "bs", "adahop") for p in (0, 2)),
        *(f"pyg loader {name}" for name in PYG),
    )
]


@pytest.fixture(scope="module")
def found():
    return entries()


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("name", NAMES)
def test_batches_are_what_they_were(name, threads, found, many_threads):
    if threads > 1 and name.startswith(("cluster-gcn", "graphsaint")) and "digits" in name:
        pytest.skip("their set-up is slow, and the smaller graphs show it")
    with ops.threads(threads):
        now = found[name]()
    assert same(now, kept()[name], kept()["cpu"] == cpu())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_uniform_draws_on_a_gpu_are_what_they_were():
    for name, find in entries(cuda=True).items():
        assert find() == kept()[name]


def test_a_change_would_be_seen():
    from fingerprints import method

    graph = graphs()["messy"]
    other = graph.normalized("row", False)
    assert method("bs", graph) != method("bs", other)
