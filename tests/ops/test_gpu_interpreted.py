"""The GPU's kernels without a GPU: the same tests in Triton's interpreter, chosen before Triton is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and test_gpu.py runs on it")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_interpreted():
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "test_gpu.py"]
    done = subprocess.run(command, cwd=Path(__file__).parent, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert done.stdout.count(".") > 40, done.stdout  # not all of them skipped
