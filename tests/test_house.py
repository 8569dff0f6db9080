"""The rules of the house: who may import whom, examples that run."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "adahop"
FILES = sorted(ROOT.rglob("*.py"))

# room -> what it must never import; a name covers all below it
MODELS, SAMPLERS = ("adahop.models",), ("adahop.samplers", "adahop.policies")
ABOVE = ("adahop.loader", "adahop.train", "adahop.methods", "adahop.cli", "adahop.datasets", "adahop.diagnostics",
         "adahop_lab")  # fmt: skip
NEVER = {
    "ops": ("torch_geometric", "adahop.graph", "adahop.block", "adahop.draws", "adahop.sum", "adahop.watcher",
            "adahop.checks", *SAMPLERS, *MODELS, *ABOVE),
    "errors": ("torch", "numpy", "torch_geometric", "adahop"),
    "checks": ("torch_geometric", "adahop.graph", "adahop.ops", *SAMPLERS, *MODELS, *ABOVE),
    "graph": (*SAMPLERS, *MODELS, *ABOVE),
    "block": (*SAMPLERS, *MODELS, *ABOVE),
    "draws": (*SAMPLERS, *MODELS, *ABOVE),
    "policies": (*MODELS, *ABOVE, "adahop.samplers", "adahop.sum", "adahop.watcher", "torch.optim"),
    "samplers": (*MODELS, *ABOVE, "adahop.sum", "adahop.watcher", "torch.optim"),
    "messages": (*SAMPLERS, *ABOVE, *MODELS, "adahop.sum", "adahop.watcher"),
    "sum": (*SAMPLERS, *ABOVE, *MODELS),
    "history": (*SAMPLERS, *ABOVE, *MODELS),
    "features": (*SAMPLERS, *MODELS, *ABOVE),
    "capture": ("adahop.train", "adahop.cli", "adahop.diagnostics", "adahop.datasets", "numba", "triton"),
    "models": (*SAMPLERS, *ABOVE),
    "watcher": (*SAMPLERS, *ABOVE, *MODELS, "adahop.sum", "adahop.graph"),
    "loader": (*MODELS, "adahop.train", "adahop.cli", "adahop.watcher"),
    "metrics": (*SAMPLERS, *MODELS, *ABOVE),
    "methods": (*MODELS, "adahop.loader", "adahop.train", "adahop.cli", "adahop.watcher", "adahop.datasets"),
    "datasets": (*SAMPLERS, *MODELS, "adahop.loader", "adahop.train", "adahop.methods", "adahop.cli"),
    "config": ("adahop.loader", "adahop.train", "adahop.cli", "adahop.datasets", "adahop.diagnostics"),
    "storage": (*SAMPLERS, *MODELS, *ABOVE),
    "records": (*SAMPLERS, *MODELS, *ABOVE),
    "checkpoint": (*SAMPLERS, *MODELS, *ABOVE),
    "diagnostics": ("adahop.cli", "adahop.datasets", "numba", "triton"),
    "convert": (*SAMPLERS, *MODELS, "adahop.loader", "adahop.train", "adahop.cli"),
    "pyg": ("adahop.train", "adahop.cli", "adahop.datasets", "adahop.diagnostics"),
    "train": ("adahop.cli", "adahop.diagnostics", "numba", "triton"),
    "run": ("adahop.train", "adahop.cli", "adahop.diagnostics", "numba", "triton"),
    "distributed": (*MODELS, *ABOVE),
    "mapped": (*SAMPLERS, *MODELS, *ABOVE),
    "cli": ("numba", "triton", *(f"adahop.ops.{part}" for part in ("drawing", "numbering", "summing", "learning"))),
}  # fmt: skip
# rooms that also stay out of global random state
RANDOM_FREE = ("ops", "graph", "block", "draws", "policies", "samplers", "loader")


def room(path: Path) -> str:
    part = path.relative_to(ROOT).parts[0]
    return part.removesuffix(".py")


def imports(tree: ast.AST) -> set[str]:
    """Every module that is imported, `from a import b` as a and a.b; type-only imports count too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {node.module or ""} | {f"{node.module}.{a.name}" for a in node.names}
    return names


def within(name: str, rule: str) -> bool:
    return name == rule or name.startswith(rule + ".")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports(path):
    names = imports(ast.parse(path.read_text()))
    for rule in NEVER.get(room(path), ()):
        bad = sorted(n for n in names if within(n, rule))
        assert not bad, f"{room(path)} must not import {bad[0]}"


def test_the_rule_sees_a_breach():
    names = imports(ast.parse("from adahop.samplers import base\nfrom adahop import graph\nimport torch_geometric.nn"))
    assert {"adahop.samplers", "adahop.samplers.base", "adahop.graph", "torch_geometric.nn"} <= names
    assert within("adahop.samplers.base", "adahop.samplers") and not within("adahop.samplersx", "adahop.samplers")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_manners(path):
    text, tree = path.read_text(), ast.parse(path.read_text())
    if text.strip():
        assert ast.get_docstring(tree), "a file says in one sentence what it is for"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"class {node.name} must have a docstring"
    if room(path) in RANDOM_FREE:
        calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        for name in calls:
            head = name.split(".")
            assert name not in ("torch.manual_seed", "torch.rand", "torch.randn", "torch.randint", "torch.randperm",
                                "torch.multinomial", "torch.bernoulli"), f"{name} has no seed of ours"  # fmt: skip
            assert head[:2] not in (["np", "random"], ["numpy", "random"]), f"{name} has no seed of ours"
    if room(path) == "train":
        asked = [
            ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "isinstance"
        ]
        assert not any("ampler" in a for a in asked), "train must not ask what kind of sampler it has"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_run(path):
    name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    if name.endswith("__main__"):
        pytest.skip("running it is its purpose")
    if ".gpu" in name and importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in ("graph", "draws", "policies.exp3", "samplers.neighbor", "methods", "loader", "watcher", "train"):
        found = finder.find(importlib.import_module(f"adahop.{name}"))
        assert any(t.examples for t in found), f"adahop.{name} must have an example"
