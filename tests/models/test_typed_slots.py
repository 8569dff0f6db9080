"""Models over padded typed blocks: the outputs and gradients of compact ones, from one table of all types' features."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import adahop
from adahop import ops
from adahop.capture import DeviceSteps
from adahop.config import Config
from adahop.features import Features, TypedFeatures
from adahop.run import Run, device_features
from adahop.samplers.loop import Padded, TypedPadded
from adahop.step import train_step
from adahop.watcher import watch

from typed_graphs import COUNTS, RELATIONS, batch_of, build, typed_data  # isort: skip
from waiting import NoWaiting  # isort: skip

SEEDS = torch.tensor([3, 17, 38, 0, 20])
MODELS = {
    "rgcn": ("rgcn", {}),
    "sage": ("rgcn", {"conv": "sage"}),
    "bases": ("rgcn", {"bases": 2}),
    "blocks": ("rgcn", {"blocks": 4}),
    "rgat": ("rgat", {}),
}


def both(data, model: str, estimator: str, arch: str = "residual", seeds=SEEDS):
    """(outputs, gradients, energies) from compact and from padded blocks with the same draws, memories a little old."""
    out = []
    for padded in (False, True):
        name, options = MODELS[model]
        built = build(name, data, arch=arch, **options)
        graph = data.graph.normalized(*built.graph)
        sampler = adahop.make("graphsage", graph, [3, 2], seed=1)
        sampler.skip = built.remember(estimator, graph, data.x)
        with torch.no_grad():
            for p in built.parameters():
                p.mul_(1.05)
        blocks = sampler.sample(seeds, Padded.fitted(sampler, seeds=seeds) if padded else None)
        batch = batch_of(data, blocks)
        if padded:
            batch = SimpleNamespace(x=None, features=Features(data.x.joined(), "cpu"), blocks=blocks)
        with watch(built.eval()) as energy:
            result = built(batch)
        result.square().sum().backward()
        out.append((result.detach(), {k: p.grad for k, p in built.named_parameters()}, blocks, energy))
    return out


@pytest.mark.parametrize("arch", ["plain", "residual"])
@pytest.mark.parametrize("estimator", ["plain", "exact", "snapshot", "history", "exact+snapshot", "exact at once"])
@pytest.mark.parametrize("model", MODELS)
def test_padded_blocks_give_what_compact_ones_give(model, estimator, arch, monkeypatch):
    """Exact sums "at once" are made before the first step, as on a GPU, and not row by row."""
    if estimator == "exact at once":
        monkeypatch.setenv("ADAHOP_REFERENCE", "1")
        estimator = "exact"
    if (model, arch) == ("blocks", "plain"):
        pytest.skip("three outputs are not four blocks")
    (want, true, _, _), (got, ours, _, _) = both(typed_data(), model, estimator, arch)
    assert torch.allclose(got, want, atol=1e-5)
    for name, grad in true.items():
        mine = ours[name]
        if grad is None or mine is None:  # of a type or a relation that this batch does not meet
            assert all(g is None or not bool(g.any()) for g in (grad, mine)), name
        else:
            assert torch.allclose(mine, grad, atol=1e-4, rtol=1e-4), name


@pytest.mark.parametrize("estimator", ["plain", "exact+snapshot"])
@pytest.mark.parametrize("kind", ["author", "venue", "tag"])
def test_seeds_of_any_type(kind, estimator, monkeypatch):
    """Also of one that nothing points to."""
    monkeypatch.setenv("ADAHOP_REFERENCE", "1")
    first = typed_data().x.schema.starts[kind]
    (want, *_), (got, *_) = both(typed_data(), "rgcn", estimator, seeds=torch.arange(first, first + 3))
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("estimator", ["plain", "exact+snapshot"])
@pytest.mark.parametrize("model", ["rgcn", "rgat"])
def test_energies_are_those_of_compact_blocks(model, estimator):
    """Edge by edge, known by target and place in the graph; empty slots have none."""
    found = []
    for _, _, blocks, energy in both(typed_data(), model, estimator):
        of: dict[tuple[int, int, int], float] = {}
        for layer, (block, e) in enumerate(zip(blocks, energy, strict=True)):
            assert e.shape == (block.num_edges,) and not bool(e[block.scale == 0].any())
            for at in (block.scale > 0).nonzero().flatten().tolist():
                of[layer, int(block.targets[block.dst[at]]), int(block.pos[at])] = float(e[at])
        found.append(of)
    compact, padded = found
    assert set(compact) <= set(padded) and len(compact) > 20
    assert all(padded[key] == pytest.approx(value, rel=1e-4, abs=1e-6) for key, value in compact.items())


def test_with_every_neighbour_in_a_slot_a_batch_is_the_whole_graph():
    """As many slots as the largest row has neighbours: nothing is left to chance."""
    data = typed_data()
    model = build("rgcn", data)
    graph = data.graph.normalized(*model.graph)
    k = int((graph.last - graph.first).max())
    sampler = adahop.make("graphsage", graph, [k], seed=1)
    one = build("rgcn", data, layers=1)
    blocks = sampler.sample(SEEDS, Padded.fitted(sampler, seeds=SEEDS))
    batch = SimpleNamespace(x=None, features=Features(data.x.joined(), "cpu"), blocks=blocks)
    assert torch.allclose(one(batch), one.inference(graph, data.x)[SEEDS], atol=1e-5)


def test_one_table_of_all_types():
    data = typed_data()
    table = data.x.joined(torch.float16)
    assert data.x.why_separate() is None and table.shape == (75, 5) and table.dtype == torch.float16
    for kind, start in data.x.schema.starts.items():
        x = data.x.tables[kind]
        assert torch.equal(table[start : start + len(x), : x.shape[1]], x.half())
        assert not bool(table[start : start + len(x), x.shape[1] :].any())
    assert "learnt rows" in typed_data(bare=True).x.why_separate()
    wide = {t: torch.zeros(n, 100 if t == "tag" else 1) for t, n in COUNTS.items()}
    assert "differ too much in width" in TypedFeatures(wide, COUNTS, RELATIONS).why_separate()


# --- steps -----------------------------------------------------------------------------------------------------------


def padded_run(data, **options) -> Run:
    """A run whose steps are those of a GPU, without one."""
    given = {"model": "rgcn", "method": "graphsage", "sizes": (2, 2), "hidden": 8, "batch_size": 7, "dropout": 0.0}
    if options.get("method") == "adahop":
        given["method_options"] = {"draw": "systematic"}  # what "auto" is on a GPU
    torch.manual_seed(0)
    run = Run(data, Config(**{**given, "epochs": 2, **options}), 0)
    shape = Padded.fitted(run.sampler, bare=True, seeds=run.loader.nodes)
    assert isinstance(shape, Padded), shape
    run.padded, run.features = shape, device_features(run.data.x, run.sampler, run.config)
    return run


@pytest.mark.parametrize("arch", ["plain", "residual"])
@pytest.mark.parametrize("model", ["rgcn", "rgat"])
@pytest.mark.parametrize("estimator", ["plain", "exact+snapshot"])
def test_steps_are_those_of_compact_blocks(model, arch, estimator):
    """Uniform draws are equal, so the losses are, whatever the blocks' shape: two epochs, the last batch smaller."""
    options = {"model": model, "arch": arch, "estimator": estimator, "noise": 0.0}
    run = padded_run(typed_data(), **options)
    steps = DeviceSteps(run, capture=False)
    ours = [float(loss) for _ in range(2) for loss, _ in steps]
    torch.manual_seed(0)
    eager = Run(typed_data(), run.config, 0)
    true = []
    for _ in range(2):
        for batch in eager.loader:
            true.append(float(train_step(eager.model, eager.sampler, eager.optimizer, batch)))
    assert len(ours) == 6 and ours == pytest.approx(true, rel=1e-4)


def test_a_run_says_why_its_steps_have_no_fixed_shape(monkeypatch):
    """What a run on a GPU would answer."""
    monkeypatch.setattr(ops, "pads", lambda at: True)

    def asked(model: str, bare: bool = False, **options):
        run = Run(typed_data(bare), Config(model=model, sizes=(2, 2), hidden=8, epochs=1, **options), 0)
        assert run.padded is None and run.unpadded == "it needs a CUDA device"
        run.config = SimpleNamespace(device="cuda", model=model)
        return run.fixed_shape(run.loader.nodes)

    assert isinstance(asked("rgcn"), TypedPadded) and isinstance(asked("rgat", method="bs"), TypedPadded)
    assert asked("hgt") == "the layers of hgt read all relations of a target together"
    assert "learnt rows" in asked("rgcn", bare=True)
    assert asked("rgcn", method="labor") == "its method has no fixed fan-out"


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("model", "method", "estimator"),
    [
        ("rgcn", "graphsage", "plain"),
        ("rgcn", "bs", "plain"),
        ("rgcn", "adahop", "exact+snapshot"),
        ("rgcn", "graphsage", "snapshot"),
        ("rgat", "graphsage", "plain"),
    ],
)
def test_a_step_never_waits_for_the_device(model, method, estimator, dropout, monkeypatch):
    """Of a second step, draws, both passes and what is learnt: no number is read and no shape depends on one.

    Operations that are kernels on a GPU are left out: here they are references, which may look.
    """
    monkeypatch.setenv("ADAHOP_REFERENCE", "1")
    run = padded_run(typed_data(), model=model, method=method, estimator=estimator, dropout=dropout, noise=0.0)
    track = ops.OPS["track"].reference
    monkeypatch.setattr(ops.OPS["track"], "reference", lambda *given: track(*given) and False)  # as a GPU's answers
    steps = DeviceSteps(run, capture=False)
    steps.step(torch.arange(7))
    mode = NoWaiting()
    for op in ops.OPS.values():
        if op._cuda is not None:
            monkeypatch.setattr(op, "reference", mode.aside(op.reference))
    with mode:
        loss = steps.step(torch.arange(7, 14))
    assert bool(torch.isfinite(loss)) and mode.seen > 100
