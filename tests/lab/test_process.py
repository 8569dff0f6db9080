"""The memory of a process, and what another one prints."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from adahop_lab.process import Peak, forget, limited, memory, printed, turn

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
SAYS = [sys.executable, "-c", "print('first'); print('{\"a\": 1}')"]


def test_the_memory_of_this_process():
    now, most = memory(), memory("VmHWM")  # in this order: it may grow in between
    assert most >= now - (1 << 20) and now > memory("RssAnon") > 1 << 20 and memory("no such line") == 0
    with Peak() as peak:
        peak.done.wait(0.2)
    assert peak.value >= 1 << 20


def test_the_last_line_that_a_process_prints(tmp_path):
    assert printed(SAYS) == {"a": 1}
    with pytest.raises(subprocess.CalledProcessError):
        printed([sys.executable, "-c", "raise SystemExit(3)"])
    (tmp_path / "x.npy").write_bytes(b"1")
    forget(tmp_path)
    found = limited(SAYS, 256)  # None where no group can be made
    assert found is None or (found["a"] == 1 and "256 MiB" in found["limit"])


def test_one_process_measures_at_a_time(tmp_path, monkeypatch):
    def free():
        with open(tmp_path / "turn", "w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    with turn():  # nobody shares a file: nothing is waited for
        pass
    monkeypatch.setenv("ADAHOP_TURN", str(tmp_path / "turn"))
    with turn():
        assert not free()
    assert free()
