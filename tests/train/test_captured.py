"""Steps on a GPU, captured and replayed, on a machine without one; see `pretended_cuda`."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adahop import capture, fit, load, ops
from adahop.config import Config
from adahop.diagnostics import Probe
from adahop.methods import METHODS
from adahop.run import Run
from conftest import messy_graph, toy_data
from typed_graphs import typed_data

triton = pytest.importorskip("triton")
from pretended_cuda import pretended_cuda  # noqa: E402

pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton interprets in this process"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and test_gpu.py runs on it"),
    pytest.mark.filterwarnings("ignore:.*FP_FUSION"),
]


@pytest.fixture
def cuda():
    with pretended_cuda() as (device, _):
        yield device


# --- the pretended GPU itself -----------------------------------------------------------------------------------------


def test_two_devices_do_not_mix(cuda):
    there, here = torch.ones(3, device="cuda"), torch.ones(3)
    assert there.is_cuda and there.device.type == "cuda" and not there.is_cpu and there.to("cpu").is_cpu
    assert (there + 1.0).is_cuda and there[torch.tensor([0, 2])].is_cuda  # numbers and indices may come from the host
    for mixed in (lambda: there + here, lambda: torch.cat([there, here]), lambda: here[there.long()],
                  lambda: there.index_add_(0, torch.zeros(3, dtype=torch.long), there)):  # fmt: skip
        with pytest.raises(RuntimeError, match="and on the CPU"):
            mixed()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()


def test_a_kernel_reads_the_device_and_pinned_memory(cuda):
    table, ids, place = torch.rand(9, 4), torch.tensor([3, 8, 3]), torch.full((9,), -1, dtype=torch.int32)
    near = torch.zeros(0, 4, device="cuda")
    found = ops.fetch(ids.to("cuda"), table.pin_memory(), near, place.to("cuda"))
    assert found.is_cuda and torch.equal(found.cpu(), table[ids])
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        ops.full_sum(torch.rand(60, 4, device="cuda"), messy_graph().edges, ids.to("cuda"))


def test_a_captured_step_is_replayed_on_the_same_memory(cuda):
    x, out, graph = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1.0
        out.copy_(x * x + torch.ones(3, device="cuda"))
    assert not x.any() and not out.any()  # nothing runs while it is captured
    for i in range(1, 4):
        graph.replay()
        assert torch.equal(out.cpu(), torch.full((3,), i * i + 1.0))


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: x[x > 0], lambda x: x.nonzero(),
        lambda x: bool(x.any()), lambda x: x.cpu(), lambda x: x.unique(), lambda x: x[[0, 1]],
        lambda x: torch.tensor([1, 2], device="cuda"), lambda x: x.repeat_interleave(x.long()),
        lambda x: x.copy_(torch.ones(3)),
    ],
)  # fmt: skip
def test_what_waits_cannot_be_captured(cuda, reads):
    x = torch.ones(3, device="cuda")
    reads(x)
    graph, told = torch.cuda.CUDAGraph(), "not permitted when stream is capturing"
    with pytest.raises(RuntimeError, match=told), torch.cuda.graph(graph):
        reads(x)


# --- steps ------------------------------------------------------------------------------------------------------------


def moved(data: Any, device: str) -> Any:
    return SimpleNamespace(**{k: v.to(device) if hasattr(v, "to") else v for k, v in vars(data).items() if k != "to"})


def run_of(data: Any, **options: Any) -> Run:
    config = Config(**{"hidden": 8, "sizes": (3, 2), "batch_size": 16, "noise": 0.0, **options}, device="cuda")
    torch.manual_seed(0)
    data.to = lambda device: moved(data, device)
    return Run(data, config, 0)


def losses(captured: bool, data: Any, epochs: int = 3, **options: Any) -> list[float]:
    """Of every step: sizes are run as they are before they are captured, and the last batch of an epoch is smaller."""
    run = run_of(data, **{"dropout": 0.0, "capture": captured, **options})
    out = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*FP_FUSION")
        steps = capture.steps(run)
        assert isinstance(steps, capture.DeviceSteps) and steps.capture == captured
        for _ in range(epochs):
            out += [float(loss) for loss, _ in steps]
            run.renew()
    assert len(steps.recorded) == (2 if captured else 0)
    return out


FAST = {("gcn", "adahop"), ("gcn", "bs"), ("gat", "adahop"), ("sage", "graphsage"), ("rgcn", "adahop"), ("rgat", "bs")}
STEPS = [
    pytest.param(model, method, marks=() if (model, method) in FAST else pytest.mark.slow)
    for model in ("gcn", "sage", "gat", "gatv2", "rgcn", "rgat")
    for method in ("graphsage", "bs", "bs.m", "adahop", "s-gcn")
    if model != "rgat" or method not in ("adahop", "s-gcn")  # all neighbours of relations have no fixed shape
]


@pytest.mark.parametrize(("model", "method"), STEPS)
def test_captured_steps_are_the_eager_steps(cuda, model, method):
    def data():
        return typed_data() if model.startswith("r") else toy_data(nodes=65)

    eager, captured = (losses(c, data(), model=model, method=method) for c in (False, True))
    assert captured == pytest.approx(eager, rel=1e-5) and len(set(eager)) == len(eager) > 5


@pytest.mark.parametrize("options", [{"half": True}, {"cache": 0.3}, {"model": "gat", "half": True}], ids=str)
def test_with_other_features(cuda, options):
    eager, captured = (losses(c, toy_data(nodes=65), **{"method": "bs", **options}) for c in (False, True))
    assert captured == pytest.approx(eager, rel=1e-5)


def test_layers_with_an_initial_residual(cuda):
    options: dict[str, Any] = {"arch": "gcnii", "method": "adahop", "sizes": (3, 3, 2)}
    eager, captured = (losses(c, toy_data(nodes=65), **options) for c in (False, True))
    assert captured == pytest.approx(eager, rel=1e-5) and len(set(eager)) == len(eager) > 5


@pytest.mark.parametrize(("model", "method"), [("gcn", "bs"), ("gcn", "adahop"), ("rgcn", "bs")])
def test_dropout_is_drawn_anew_at_every_replay(cuda, model, method):
    """Replays draw from the generator that eager steps draw from, as often."""
    data = typed_data if model == "rgcn" else lambda: toy_data(nodes=65)
    eager, captured = (losses(c, data(), model=model, method=method, dropout=0.3) for c in (False, True))
    assert captured == pytest.approx(eager, rel=1e-5)


def test_a_step_that_waits_runs_eagerly(cuda, monkeypatch):
    run = run_of(toy_data(nodes=65), model="gcn", method="bs")
    learn = run.sampler.learn
    monkeypatch.setattr(run.sampler, "learn", lambda blocks, energy: float(energy[0].sum()) and learn(blocks, energy))
    steps, stream = capture.DeviceSteps(run, True), torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="cannot be captured .* not permitted when stream is capturing"):
        assert len([float(loss) for _ in range(2) for loss, _ in steps]) == 6
    assert not steps.capture and torch.cuda.current_stream() is stream


@pytest.mark.parametrize("method", ["adahop", "s-gcn"])
def test_a_capture_that_breaks_off_leaves_nothing_to_write(cuda, monkeypatch, method):
    """Rows of a history are written when a step is over, and this one never ran."""

    def run(captured: bool) -> list[float]:
        made = run_of(toy_data(nodes=65), model="gat", method=method, dropout=0.0)
        steps, graph = capture.DeviceSteps(made, captured), made.model.sums(1)
        full = graph.full_block
        asks = lambda block: (graph.capacity and float(block.scale.sum()), full(block))[1]  # noqa: E731
        monkeypatch.setattr(graph, "full_block", asks)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            out = [float(loss) for _ in range(3) for loss, _ in steps]
        assert captured == any("cannot be captured" in str(w.message) for w in said)
        return out

    assert run(True) == pytest.approx(run(False), rel=1e-5)


def test_a_history_without_a_pass_has_no_fixed_shape(cuda):
    """Rows of nodes that are met for the first time make room for themselves."""
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph, so it runs eagerly: its estimator reads"):
        data = toy_data(nodes=65)
        data.to = lambda device: moved(data, device)
        fit(data, method="s-gcn", sizes=(2, 2), hidden=8, epochs=2, judged=9, device="cuda", capture=True)


# --- whole runs -------------------------------------------------------------------------------------------------------

WHOLE = {
    **{f"gcn {method}": {"method": method} for method in METHODS},
    **{f"gat {method}": {"model": "gat", "method": method} for method in METHODS if "gat" in METHODS[method].models},
    **{f"{model} {method}": {"model": model, "method": method}
       for model in ("rgcn", "rgat", "hgt") for method in ("graphsage", "bs", "adahop", "labor")},
    "geniepath": {"model": "geniepath", "method": "bs"},
    "half": {"method": "adahop", "half": True, "dropout": 0.1},
    "race": {"method": "adahop", "noise": "auto", "epochs": 10},
    "average": {"method": "adahop", "average": 0.9},
    "budget": {"method": "bs", "method_options": {"budget": True}},
    "bfloat16": {"method": "bs", "features": "bfloat16"},
    "typed cache": {"model": "rgcn", "method": "bs", "cache": 0.3},
    "typed half": {"model": "rgcn", "method": "adahop", "half": True, "dropout": 0.1},
}  # fmt: skip
SHORT = {
    "race",
    "gcn labor",
    "gcn ladies",
    "gcn as-gcn",
    "gcn cluster-gcn",
    "gat labor",
    "half",
    "budget",
    "typed cache",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SHORT else pytest.mark.slow) for n in WHOLE])
def test_a_run(cuda, name):
    """From the first epoch to the scores: evaluation, memories and policies find all they need on the device."""
    options = {"model": "gcn", "epochs": 2, "noise": 0.0, "hidden": 8, "batch_size": 16, **WHOLE[name]}
    sizes = (30, 30) if METHODS[options["method"]].family == "layer-wise" else (3, 2)
    data = typed_data() if options["model"] in ("rgcn", "rgat", "hgt") else toy_data(nodes=65)
    data.to = lambda device: moved(data, device)
    result = fit(data, sizes=sizes, device="cuda", **options)
    assert result.epochs >= 2 and 0.2 < result.history[-1]["loss"] < 2


def test_the_data_that_is_given_stays_where_it_is(cuda):
    data = load("planted:120,700,8,3,signal=0.6")
    probe = Probe(data, nodes=20, every=2, repeats=2)
    result = fit(data, method="bs", sizes=(2, 2), epochs=2, hidden=8, batch_size=32, device="cuda", probe=probe)
    assert probe.rows and next(result.model.parameters()).is_cuda
    assert data.x.is_cpu and data.y.is_cpu and data.train_mask.is_cpu and data.graph.indptr.is_cpu
