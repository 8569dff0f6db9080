"""Resume: a run that was stopped anywhere ends as if it had not been; damaged files are noticed and passed over."""

from __future__ import annotations

import pytest
import torch

from adahop.checkpoint import MARK, Checkpoints, pace, read
from adahop.checks import InputError, KindError
from adahop.config import as_said
from adahop.methods import METHODS, OF_ATTENTION
from adahop.sum import ESTIMATORS
from adahop.train import fit
from conftest import toy_data

FAST = {"hidden": 8, "epochs": 3, "batch_size": 32, "dropout": 0.3}
DATA = toy_data()


class Killed(Exception):
    pass


def stopping(at: int):
    def on_step(step: int) -> None:
        if step == at:
            raise Killed

    return on_step


def sizes(method: str) -> tuple[int, int]:
    return (20, 20) if METHODS[method].family == "layer-wise" else (3, 3)


def everything(result) -> dict:
    """All that a run leaves, but for what a clock decides."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in result.history]
    numbers = (result.test, result.val, result.best_epoch, result.epochs, result.steps)
    histories = [dict(m.state()) for m in result.model.memories.values()]
    return {"rows": rows, "numbers": numbers, "model": result.model.state_dict(),
            "sampler": result.sampler.state_dict(), "memory": histories}  # fmt: skip


def same(a, b) -> bool:
    if torch.is_tensor(a):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def resumed(tmp_path, stops, every=1, data=DATA, **options):
    """A run that is stopped after each of these steps, and then goes to its end."""
    for at in stops:
        with pytest.raises(Killed):
            fit(data, checkpoint=Checkpoints(tmp_path, every), on_step=stopping(at), **options)
    return fit(data, checkpoint=Checkpoints(tmp_path, every), **options)


# --- the end is the same ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_run_ends_as_one_that_was_not(tmp_path, method, prefetch):
    options = {**FAST, "method": method, "sizes": sizes(method), "prefetch": prefetch, "seed": 3}
    whole = fit(DATA, **options)
    steps = whole.steps // 3  # an epoch's
    stops = sorted({2, steps, steps + 1, 2 * steps + 1, whole.steps})  # within epochs, at their ends, at the very end
    assert same(everything(resumed(tmp_path, stops, **options)), everything(whole))


@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
@pytest.mark.parametrize("estimator", [e for e in ESTIMATORS if e != "plain"])
def test_memories_go_on(tmp_path, model, estimator):
    if estimator.split("+")[-1] in OF_ATTENTION and model != "gat":
        pytest.skip("it is attention's")
    options = {**FAST, "method": "bs", "sizes": (3, 3), "model": model, "estimator": estimator, "average": 0.9}
    options |= {"epochs": 2}
    assert same(everything(resumed(tmp_path, [2, 7], **options)), everything(fit(DATA, **options)))


@pytest.mark.parametrize("options", [
    {"method": "bs", "model": "geniepath"},
    {"method": "adahop", "model": "gat"},
    {"method": "adahop", "model": "geniepath", "prefetch": 1},
    {"method": "adahop", "model": "sage", "average": 0.9},
    {"method": "graphsage", "method_options": {"policy": "tracked", "draw": "systematic"}, "prefetch": 1},
    {"method": "graphsaint", "method_options": {"walk": "edge"}},
    {"method": "thanos", "method_options": {"restart": 3}},
    {"method": "bs", "patience": 1, "lr": 0.3, "epochs": 9},
    {"method": "s-gcn", "model": "gat", "model_options": {"heads": 2}},
])  # fmt: skip
def test_other_roads(tmp_path, options):
    options = {**FAST, "sizes": (3, 3), **options}
    assert same(everything(resumed(tmp_path, [3, 6], every=2, **options)), everything(fit(DATA, **options)))


def test_a_checkpoint_changes_nothing_and_a_finished_run_is_not_run_again(tmp_path):
    options = {**FAST, "method": "bs", "sizes": (3, 3), "prefetch": 1}
    whole, rows = fit(DATA, **options), []
    kept = fit(DATA, checkpoint=Checkpoints(tmp_path, 1), **options)
    again = fit(DATA, checkpoint=Checkpoints(tmp_path, 1), on_epoch=rows.append, on_step=stopping(1), **options)
    assert same(everything(kept), everything(whole)) and same(everything(again), everything(whole)) and not rows
    assert len(list(tmp_path.iterdir())) == 2


def test_rows_are_told_once_and_the_callers_random_state_is_left_alone(tmp_path):
    options = {**FAST, "method": "bs", "sizes": (3, 3)}
    rows: list[dict] = []
    torch.manual_seed(9)
    before = torch.get_rng_state()
    with pytest.raises(Killed):
        fit(DATA, checkpoint=Checkpoints(tmp_path, 1), on_epoch=rows.append, on_step=stopping(7), **options)
    result = fit(DATA, checkpoint=tmp_path, on_epoch=rows.append, **options)
    assert [row["epoch"] for row in rows] == [1, 2, 3] and rows == result.history
    assert torch.equal(torch.get_rng_state(), before)


# --- files -----------------------------------------------------------------------------------------------------------


def two(tmp_path):
    """A folder with the checkpoints of steps 3 and 4."""
    options = {**FAST, "method": "bs", "sizes": (3, 3)}
    with pytest.raises(Killed):
        fit(DATA, checkpoint=Checkpoints(tmp_path, 1), on_step=stopping(5), **options)
    files = Checkpoints(tmp_path).files()
    assert [read(p)["result"]["steps"] for p in files] == [3, 4]
    return files, options


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def changed(content: bytes) -> bytes:
    at = len(content) // 3
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    "damage", [cut, changed, lambda content: b"", lambda content: MARK, lambda content: content[:-1]]
)
def test_the_last_good_one_is_used_and_it_says_so(tmp_path, damage):
    files, options = two(tmp_path)
    files[1].write_bytes(damage(files[1].read_bytes()))
    with pytest.warns(UserWarning, match=rf"{files[1].name} must be .*the previous one is used"):
        result = fit(DATA, checkpoint=tmp_path, **options)
    assert same(everything(result), everything(fit(DATA, **options)))


def test_none_is_good(tmp_path):
    files, options = two(tmp_path)
    said: list[str] = []
    for path in files:
        path.write_bytes(cut(path.read_bytes()))
    with pytest.raises(
        InputError, match="must hold an intact checkpoint, got 2 damaged; delete the files to start again"
    ):
        fit(DATA, checkpoint=Checkpoints(tmp_path, say=said.append), **options)
    assert len(said) == 2 and "none is left" in said[1]


def test_a_pickle_is_never_run(tmp_path):
    class Bad:
        def __reduce__(self):
            return print, ("run",)

    path = Checkpoints(tmp_path).save({"identity": {}, "x": Bad()})
    with pytest.raises(InputError, match="must be a readable checkpoint, got UnpicklingError"):
        read(path)
    with pytest.raises(InputError, match="must hold the state of a run, got dict"):
        read(Checkpoints(tmp_path).save({"x": 1}))


@pytest.mark.parametrize("change, words", [
    ({"lr": 0.5}, "`lr` must be 0.01 as in the checkpoint, got 0.5"),
    ({"seed": 1}, "`seed` must be 0 as in the checkpoint, got 1"),
    ({"sizes": (4, 4)}, r"`sizes` must be \[3, 3\] as in the checkpoint, got \[4, 4\]"),
    ({"data": toy_data(seed=1)}, "the data's content must be '.*' as in the checkpoint, got"),
])  # fmt: skip
def test_another_runs_checkpoint_is_refused(tmp_path, change, words):
    _, options = two(tmp_path)
    with pytest.raises(InputError, match=words):
        fit(**{"data": DATA, **options, **change}, checkpoint=tmp_path)


def test_what_version_01_wrote_is_read_as_it_meant_it(tmp_path):
    """It said nothing of a dial, of heads or of the preset's estimator: one head, with a history."""
    said = {"method": "adahop", "model": "gat", "sizes": (3, 3), **FAST}
    meant = {**said, "noise": 0.0, "model_options": {"heads": 1}, "estimator": "exact+history"}
    with pytest.raises(Killed):
        fit(DATA, checkpoint=Checkpoints(tmp_path, 1), on_step=stopping(2), **meant)
    state = Checkpoints(tmp_path).last()
    assert state is not None
    del state["identity"]["noise"]
    state["identity"] |= {"model_options": {}, "estimator": None}
    Checkpoints(tmp_path).save(state)
    with pytest.raises(InputError, match=r"`estimator` must be 'exact\+history' as in the checkpoint, got None"):
        fit(DATA, checkpoint=tmp_path, **{**said, "noise": 0.0})
    assert same(everything(fit(DATA, checkpoint=tmp_path, **meant)), everything(fit(DATA, **meant)))


def test_settings_are_as_they_were_meant():
    old = {"model": "gat", "method": "adahop", "model_options": {"score": "relu"}}
    assert as_said(old)["model_options"] == {"heads": 1, "score": "relu"}
    assert as_said({**old, "model_options": {"heads": 2}})["model_options"] == {"heads": 2}
    assert as_said({**old, "method": "bs"}) == {**old, "method": "bs", "noise": 0.0,
                                               "model_options": {"heads": 1, "score": "relu"}}  # fmt: skip
    assert as_said({**old, "noise": "auto"}) == {**old, "noise": "auto"}
    assert as_said({"model": "gcn"}) == {"model": "gcn", "noise": 0.0}


def test_a_full_disk_leaves_the_files_before(tmp_path, monkeypatch):
    files, _ = two(tmp_path)
    before = [p.read_bytes() for p in files]

    class Full:
        def __init__(self, f):
            self.f = f

        def write(self, part):
            raise OSError(28, "No space left on device")

    fill = __import__("adahop.checkpoint", fromlist=["_fill"])._fill
    monkeypatch.setattr("adahop.checkpoint._fill", lambda f, state: fill(Full(f), state))
    with pytest.raises(InputError, match="must be writable, got No space left on device"):
        Checkpoints(tmp_path).save({"identity": {}, "x": torch.zeros(1000)})
    assert [p.read_bytes() for p in sorted(tmp_path.iterdir())] == before


def test_pace():
    assert pace(5) == ("steps", 5) and pace("5") == ("steps", 5) and pace("2.5s") == ("seconds", 2.5)
    assert pace("auto") == ("auto", 0)
    for bad in (0, -1, "0s", "s", "x", "", None, True, float("nan"), "infs", 1.5):
        with pytest.raises(InputError, match="`checkpoint_every` must be a number of steps"):
            pace(bad)
    for bad in (None, "", 3):
        with pytest.raises(KindError, match="`checkpoint` must be a folder"):
            Checkpoints(bad)


def test_due(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    steps, seconds, auto = Checkpoints("a", 3), Checkpoints("a", "2s"), Checkpoints("a")
    assert [steps.due(s) for s in (1, 2, 3)] == [False, False, True] and steps.due(1, end=True)
    assert not seconds.due(1) and seconds.due(1, end=True) and auto.due(1)
    auto._cost, now[0] = 0.2, 3.0
    assert seconds.due(1) and not auto.due(1) and not auto.due(1, end=True)
    now[0] = 4.5
    assert auto.due(2)
