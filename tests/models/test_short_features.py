"""Features in 16 bits: read as they lie, summed in float32, by every model and estimator."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import adahop
from adahop import InputError, ops
from adahop.block import Ungathered
from adahop.checkpoint import Checkpoints
from adahop.config import Config
from adahop.features import gather
from adahop.mapped.folder import open_array
from adahop.run import Run
from conftest import messy_graph

DATA = adahop.load("synthetic:300,3000,24,4")
FEATURES = ("float32", "bfloat16")
KINDS = [torch.float32, torch.float16, torch.bfloat16]


def block_of(g):
    return adahop.make("graphsage", g, [5]).sample(torch.arange(40))[0]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("heads", [1, 3])
def test_a_sum_reads_the_table_itself(dtype, heads):
    g = messy_graph(60, 900)
    block, gen = block_of(g), torch.Generator().manual_seed(0)
    x = torch.randn(60, 37, generator=gen).to(dtype)
    coef = torch.rand(block.num_edges, heads, generator=gen)
    given = (x, block.src, coef, block.ptr, block.n_id)
    fast = ops.table_sum(*given)
    assert fast.dtype == torch.float32 and fast.shape == (40, heads, 37)
    assert torch.allclose(fast, ops.table_sum.reference(*given), atol=1e-5)
    if heads == 1:
        total = gather(Ungathered(x, block.n_id), block, coef[:, 0])
        assert torch.allclose(total, gather(x[block.n_id].float(), block, coef[:, 0]), atol=1e-5)
        coef.requires_grad_()
        gather(Ungathered(x, block.n_id), block, coef[:, 0]).sum().backward()
        want = x[block.n_id][block.src].float().sum(1, keepdim=True)
        assert torch.allclose(coef.grad, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", KINDS)
def test_sums_over_all_neighbours(dtype):
    g, rows = messy_graph(60, 900), torch.arange(0, 60, 2)
    x = torch.randn(60, 21, generator=torch.Generator().manual_seed(0)).to(dtype)
    for fast, plain in zip(
        ops.row_sums(x, g.edges, rows, True), ops.row_sums(x.float(), g.edges, rows, True), strict=True
    ):
        assert torch.allclose(fast, plain, rtol=1e-5, atol=1e-5)


CASES = [(m, e) for m in ("gcn", "sage") for e in ("plain", "exact", "history", "exact+snapshot")]
CASES += [("gat", "plain"), ("gat", "exact+sums"), ("gatv2", "exact"), ("geniepath", "exact+history")]


@pytest.mark.parametrize(("model", "estimator"), CASES)
def test_training_differs_by_rounding_alone(model, estimator):
    ends = []
    for kind in FEATURES:
        options = {"model": model, "estimator": estimator, "features": kind, "sizes": (4, 4), "hidden": 8}
        ends.append(adahop.fit(DATA, epochs=2, dropout=0.2, noise="auto", **options).history[-1]["loss"])
    assert 0 < abs(ends[0] - ends[1]) < 0.05 and DATA.x.dtype == torch.float32


def test_what_is_kept_takes_half_the_bytes():
    runs = [Run(DATA, Config(method="graphsage", sizes=(4, 4), features=kind), 0) for kind in FEATURES]
    batches = [next(iter(run.loader)) for run in runs]
    assert [run.data.x.nbytes for run in runs] == [DATA.x.nbytes, DATA.x.nbytes // 2]
    assert torch.equal(batches[0].n_id, batches[1].n_id), "the draw reads no features"


def test_a_run_resumes(tmp_path):
    options = {"sizes": (4, 4), "hidden": 8, "features": "bfloat16", "noise": 0.0}
    whole = adahop.fit(DATA, epochs=4, **options)

    def stop(step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adahop.fit(DATA, epochs=4, checkpoint=Checkpoints(tmp_path, every=1), on_step=stop, **options)
    again = adahop.fit(DATA, epochs=4, checkpoint=tmp_path, **options)
    assert [row["loss"] for row in again.history] == [row["loss"] for row in whole.history]
    with pytest.raises(InputError, match="`features` must be 'bfloat16' as in the checkpoint, got 'float32'"):
        adahop.fit(DATA, epochs=4, checkpoint=tmp_path, **{**options, "features": "float32"})


def test_what_is_refused(tmp_path):
    with pytest.raises(InputError, match="`features` must be one of auto, float32, bfloat16, got 'int8'"):
        Config(features="int8")
    with pytest.raises(InputError, match="`features` must be auto or float32 for a model over several node types"):
        Config(model="rgcn", features="bfloat16")
    np.save(tmp_path / "x.npy", DATA.x.numpy())
    inside = copy.copy(DATA)
    inside.x = open_array(tmp_path / "x.npy")
    with pytest.raises(InputError, match="`features` must be float32 for features in a file"):
        adahop.fit(inside, features="bfloat16")
