"""Every file in examples/ runs, is short, and says what it is for."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "examples"
FILES = sorted(FOLDER.glob("*.py"))


def has(*names: str) -> bool:
    return any(importlib.util.find_spec(name) for name in names)


def test_all_are_there():
    wanted = {"quickstart", "pyg_before", "pyg_after", "gat_learned", "own_sampler", "lightning_node", "own_data",
              "hetero_before", "hetero_after"}  # fmt: skip
    assert wanted <= {path.stem for path in FILES}


@pytest.mark.parametrize("name", ["pyg", "hetero"])
def test_three_lines_change(name):
    before, after = ((FOLDER / f"{name}_{which}.py").read_text().splitlines()[1:] for which in ("before", "after"))
    new = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert len(new) == 3


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_it_is_short(path):
    text = path.read_text()
    assert len(text.splitlines()) < 80 and ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
@pytest.mark.filterwarnings("ignore")
def test_it_runs(path, monkeypatch, capsys, tmp_path):
    if path.stem.endswith("_before") and not has("pyg_lib", "torch_sparse"):
        pytest.skip("PyG's own loader needs pyg-lib or torch-sparse, which the script after it does without")
    monkeypatch.setenv("EPOCHS", "1")
    monkeypatch.setenv("ADAHOP_EXAMPLE_FAST", "1")
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as left:  # a missing extra is one sentence
            assert not left.code
    said = capsys.readouterr().out
    assert said.strip()
    if path.stem == "lightning_node" and not has("lightning"):
        assert "pip install 'adahop[lightning]'" in said
    else:
        assert "accuracy" in said
