"""Records: files are whole or absent, and any JSON reader takes them."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

from adahop.checks import InputError
from adahop.records import Records, write_whole


@pytest.fixture
def records(tmp_path) -> Records:
    return Records(tmp_path / "deep" / "out")


def test_a_folder_is_made_with_those_above_it(records):
    assert records.folder.is_dir() and list(records.folder.iterdir()) == []


def test_json_rows_and_tensors(records):
    records.json("a.json", {"x": [1, 2.5], "y": None})
    records.row("a.jsonl", {"epoch": 1})
    records.row("a.jsonl", {"epoch": 2})
    records.tensors("a.pt", {"w": torch.arange(3.0)})
    assert json.loads((records.folder / "a.json").read_text()) == {"x": [1, 2.5], "y": None}
    assert [json.loads(line)["epoch"] for line in (records.folder / "a.jsonl").open()] == [1, 2]
    assert torch.load(records.folder / "a.pt", weights_only=True)["w"].tolist() == [0.0, 1.0, 2.0]


def test_nan_and_infinity_become_null(records):
    records.json("a.json", {"loss": float("nan"), "more": [float("inf"), (1.0, -float("inf"))]})
    records.row("a.jsonl", {"loss": float("nan")})
    assert json.loads((records.folder / "a.json").read_text()) == {"loss": None, "more": [None, [1.0, None]]}
    assert (records.folder / "a.jsonl").read_text() == '{"loss": null}\n'


def test_fresh_takes_the_named_away_and_no_others(records):
    for name in ("a", "b", "c"):
        records.json(name, 1)
    records.fresh("a", "b", "never there")
    assert [p.name for p in records.folder.iterdir()] == ["c"]


@pytest.mark.parametrize("blow", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_what_goes_wrong_in_between_leaves_the_old_file(tmp_path, monkeypatch, where, blow):
    path = tmp_path / "a.json"
    write_whole(path, b"old")

    def fail(*args):
        raise blow

    monkeypatch.setattr(os, where, fail)
    with pytest.raises(KeyboardInterrupt if blow is KeyboardInterrupt else InputError) as e:
        write_whole(path, b"new and longer")
    if blow is not KeyboardInterrupt:
        assert str(e.value) == f"{path} must be writable, got No space left on device"
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below", ""):
        with pytest.raises(InputError, match=r"^`out` must be a folder that can be written, got "):
            Records(bad)


def test_a_row_that_cannot_be_written(records):
    (records.folder / "a.jsonl").mkdir()
    with pytest.raises(InputError, match="must be writable, got Is a directory"):
        records.row("a.jsonl", {})


def test_an_interrupt_waits_for_the_file(tmp_path):
    class Interrupting:
        def __reduce__(self):
            signal.raise_signal(signal.SIGINT)
            return complex, (3.0,)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker process of tests ignores it
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a.pt", lambda f: torch.save([Interrupting()], f))
    assert torch.load(tmp_path / "a.pt", weights_only=False) == [3]
    with pytest.raises(KeyboardInterrupt):
        Records(tmp_path).tensors("b.pt", {"a": Interrupting()})
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
