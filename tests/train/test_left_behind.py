"""What a step leaves behind: nothing of its autograd graph, even before the garbage collector runs."""

from __future__ import annotations

import gc

import pytest
import torch

from adahop.config import Config
from adahop.run import Run
from adahop.step import train_step
from conftest import toy_data
from typed_graphs import typed_data

CASES = [
    *((model, method) for model in ("gcn", "gat") for method in ("bs", "adahop", "s-gcn")),
    *((model, method) for model in ("rgcn", "hgt") for method in ("bs", "adahop")),
    ("gatv2", "adahop"), ("geniepath", "bs"), ("rgat", "bs"),
]  # fmt: skip


def with_graph() -> int:
    return sum(1 for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.grad_fn is not None)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("model, method", CASES)
def test_a_step_frees_its_graph(model, method, dropout):
    """What is kept would double the memory of the next step, and on a GPU mix the streams of steps and captures."""
    data = typed_data() if model in ("rgcn", "rgat", "hgt") else toy_data(nodes=30)
    data.to = lambda device: data
    config = Config(model=model, method=method, sizes=(2, 2), hidden=8, batch_size=7, dropout=dropout, noise=0.0)
    torch.manual_seed(0)
    run = Run(data, config, 0)
    first, second = [batch for batch, _ in zip(run.loader, range(2), strict=False)]
    gc.collect()
    before = with_graph()
    gc.disable()
    try:
        for batch in (first, second):
            train_step(run.model, run.sampler, run.optimizer, batch)
            assert with_graph() == before
    finally:
        gc.enable()
