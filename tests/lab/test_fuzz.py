"""Damaged files: cut, changed, mixed or foreign, each is refused in one sentence and none ends the process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parents[2] / "lab" / "benchmarks" / "fuzz.py"


def test_a_damaged_file_is_one_sentence():
    """150 refusals, in a process of their own: it forks. The thousand of docs/reliability.md is the same script."""
    args = [sys.executable, str(FUZZ), "--refused", "150", "--seed", "1"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["refused"] == 150 and said["wrong ones"] == [] and said["taken"] < 0.3 * said["files"]
