"""What a run was made with: versions, the commit of this library, the machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import adahop

PACKAGES = ("torch", "torch_geometric", "numba", "numpy", "scipy", "scikit-learn")


@cache
def made_with() -> dict[str, Any]:
    """The same for every run of one installation."""
    versions = {"adahop": adahop.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"commit": commit(Path(__file__).parents[4]), "versions": versions}


def commit(root: Path) -> str | None:
    """The commit of the source tree, "+changes" where its code was changed since; None where there is no repository."""
    if _git(root, "ls-files", "--error-unmatch", "src/adahop/__init__.py") is None:  # another project's repository
        return None
    head, changed = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--", "src", "lab/src")
    return None if head is None else head + ("+changes" if changed else "")


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def machine(jobs: int, device: str) -> dict[str, Any]:
    """What seconds depend on."""
    said = {"system": platform.system(), "machine": platform.machine(), "cores": os.cpu_count(), "jobs": jobs}
    if device.startswith("cuda"):
        return {**said, "device": torch.cuda.get_device_name(device)}
    return {**said, "device": _processor() or "cpu"}


@cache
def _processor() -> str:
    if sys.platform.startswith("linux"):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
