"""Memory: flat over many epochs, and one sentence when there is too little. Measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from adahop.checks import InputError, RoomError, room_for

RESIDENT = Path(__file__).parents[2] / "lab" / "benchmarks" / "resident.py"
MARGIN = 8.0  # MiB that the allocator may still spread over 40 epochs; an epoch's batches come to about as much each


@pytest.mark.parametrize("prefetch", [0, 2])
def test_resident_size_is_flat(prefetch):
    """Live tensors are the same to the byte after 10 and after 50 epochs; the process grows by less than the margin."""
    args = [sys.executable, "-W", "ignore", str(RESIDENT), "--epochs", "50", "--prefetch", str(prefetch)]
    args += ["--methods", "bs,s-gcn" if prefetch else "bs.m,graphsaint,as-gcn", "--data", "synthetic:600,6000,32,3"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        row = json.loads(line)
        assert row["tensors_grew_bytes"] == 0, row
        assert row["resident_last_mib"] - row["resident_early_mib"] < MARGIN, row


little = """
import resource, sys, torch, adahop
from adahop.checks import RoomError
torch.set_num_threads(1)
n, many = 200_000, 4_000_000
graph = adahop.Graph.from_csr(torch.arange(n + 1) * (many // n), torch.arange(many) % n)
row, data = graph.normalized(), adahop.load("synthetic:2000,20000,16,2")
warm = adahop.fit(data, epochs=1, sizes=(2, 2), hidden=4)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 150 * 2**20,) * 2)
for what in (
    lambda: adahop.make("bs", graph, [2] * 20),
    lambda: adahop.make("graphsage", graph, [2] * 400, policy="tracked"),
    lambda: adahop.models.make("gcn", 16, 20_000, 2, layers=2),
    lambda: adahop.models.make("gcn", 16, 64, 2).remember("history", row, torch.zeros(n, 16)),
    lambda: adahop.fit(data, epochs=1, sizes=(2, 2), hidden=20_000, model="sage", arch="plain"),
):
    try:
        what()
        print("no error")
    except RoomError as e:
        print(e)
"""


def test_an_out_of_memory_says_what_needed_how_much():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", little], capture_output=True, text=True, timeout=300)
    said = done.stdout.splitlines()
    assert done.returncode == 0 and len(said) == 5, done.stdout + done.stderr
    assert said[0].startswith("the state of method 'bs' must have room: it needs 0.298 GiB more"), said[0]
    assert said[1].startswith("the state of method 'graphsage' must have room: it needs 0.298 GiB more"), said[1]
    assert said[2].startswith("a gcn of width 20000 must have room: it needs 1.49 GiB more"), said[2]
    assert "must have room: it needs" in said[3] and "must have room: it needs" in said[4], said


def test_room_for_passes_on_what_is_not_about_room():
    with pytest.raises(RuntimeError, match=r"^a bug$"), room_for("x"):
        raise RuntimeError("a bug")
    with pytest.raises(RoomError, match=r"^x must have room: it needs 2 GiB more, got") as e, room_for("x"):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
    assert isinstance(e.value, InputError) and isinstance(e.value, MemoryError)
    with pytest.raises(RoomError, match=r"^x must have room: it needs more memory, got"), room_for("y"), room_for("x"):
        raise MemoryError
