"""lab/benchmarks/gpu_all.sh with a Python that only says what it was asked: jobs, their ends, and what comes back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "lab" / "benchmarks" / "gpu_all.sh"
FAKE = """#!/usr/bin/env bash
echo "asked: $*"
echo "path: $PYTHONPATH"
case "$*" in
    *"import pytest, typer"*) exit ${LACKS:-0} ;;
    *"--parts typed"*) echo "no memory"; exit 3 ;;
    *"--parts growth"*) exec sleep 30 ;;
esac
"""
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("bash", "timeout", "tar", "realpath"))), reason="needs bash, timeout, tar and realpath"
)


def run(folder: Path, *jobs: str, **told: str) -> tuple[dict[str, str], str]:
    """How each job ended, and what was printed."""
    python = folder / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    given = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHON": str(python), **told}
    done = subprocess.run(
        ["bash", FILE, "out", *jobs], cwd=folder, env=given, capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in (folder / "out" / "jobs.jsonl").read_text().splitlines()]
    return {row["job"]: row["exit"] for row in rows}, done.stdout


def test_a_job_that_fails_stops_no_other_and_all_comes_back_in_one_file(tmp_path):
    ended, said = run(tmp_path, PACK="results.tgz", SECONDS_IN_ALL="7")
    assert ended["typed"] == "3" and "no memory" in said
    assert ended["growth"] == "124" and ended["pyg_cpu"] == "skipped"  # the first ran until the time was over
    assert all(ended[name] == "0" for name in ended.keys() - {"machine", "typed", "growth", "pyg_cpu"})
    with tarfile.open(tmp_path / "results.tgz") as packed:
        names = set(packed.getnames())
    assert {f"./{name}.log" for name in ended.keys() - {"pyg_cpu"}} | {"./jobs.jsonl"} <= names


def test_some_jobs_on_a_machine_without_packages(tmp_path):
    ended, _ = run(tmp_path, "setup", "fingerprints_beside", LACKS="1", PACKAGES="mine")
    assert ended == {"fingerprints_beside": "0", "setup": "0"}
    log = (tmp_path / "out" / "setup.log").read_text()
    assert "-m adahop bench" not in log and log.splitlines()[-1].endswith(f":{tmp_path / 'mine'}")
    assert str(FILE.parents[2] / "lab" / "src") in log
