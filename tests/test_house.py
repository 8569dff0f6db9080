"""The rules of the house: who may import whom, examples that run."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
ROOT = TOP / "src" / "adahop"
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
    "typed": ("adahop.graph", *SAMPLERS, *MODELS, *ABOVE),
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
    "step": ("adahop.loader", "adahop.train", "adahop.cli", "adahop.diagnostics", "adahop.datasets", "numba", "triton"),
    "train": ("adahop.cli", "adahop.diagnostics", "numba", "triton"),
    "race": ("adahop.train", "adahop.cli", "adahop.diagnostics", "numba", "triton"),
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


# --- what no line may do ----------------------------------------------------------------------------------------------

DOORS = ("loader.py", "pyg/loader_options.py", "pyg/lightning.py")  # where users hand in a sampler of theirs
SEAMS = ("graph", "block", "blocks", "batch", "conv", "run", "sampler", "model", "data")


def untyped(node: ast.AST) -> bool:
    """`Any` for one of the objects that parts hand to each other."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    given = [a for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if a.arg in SEAMS]
    return any(a.annotation is not None and ast.unparse(a.annotation) in ("Any", "Any | None") for a in given)


def asks_for_a_device(node: ast.AST) -> bool:
    """Which kernels run, and where, is for `ops` to know."""
    if not isinstance(node, ast.Attribute):
        return False
    text = ast.unparse(node)
    form = text.startswith("ops.") and node.attr == "form"
    return form or node.attr in ("is_cuda", "is_cpu", "on_gpu", "fast") or text.endswith("device.type")


def asks_for_a_sampler(node: ast.AST) -> bool:
    """Shared code asks a sampler for what it does, not for its class."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and "ampler" in ast.unparse(node)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_line_breaks_these(path):
    rules = [untyped]
    if room(path) != "ops":
        rules.append(asks_for_a_device)
    if str(path.relative_to(ROOT)) not in DOORS:
        rules.append(asks_for_a_sampler)
    nodes = list(ast.walk(ast.parse(path.read_text())))
    assert [f"{n.lineno}: {rule.__doc__}" for rule in rules for n in nodes if rule(n)] == []


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (untyped, "def f(x, *, graph: Any | None = None): pass"),
        (asks_for_a_device, "ops.padded.form(t) != 'cuda'"),
        (asks_for_a_device, "self.graph.device.type == 'cpu'"),
        (asks_for_a_device, "t.is_cpu"),
        (asks_for_a_sampler, "isinstance(sampler, Labor)"),
    ],
)
def test_the_rules_see_a_breach(rule, line):
    assert any(rule(node) for node in ast.walk(ast.parse(line)))


def test_nothing_changes_what_torch_means():
    """State lies where its storage says; no mode catches torch's functions."""
    for path in FILES:
        assert "TorchFunctionMode" not in path.read_text(), path


HOLDS = ("pyg/batches.py", "ops/registry.py")  # weak references; the operations themselves


def test_no_module_holds_what_was_made():
    """A cache of a module lives as long as the process: what is kept belongs to the object that needs it."""
    for path in FILES:
        if str(path.relative_to(ROOT)) in HOLDS:
            continue
        for node in ast.parse(path.read_text()).body:
            value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
            empty = isinstance(value, ast.Dict | ast.List) and not ast.unparse(value).strip("{}[]")
            assert not empty and (value is None or ast.unparse(value) not in ("set()", "dict()", "list()")), (
                f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
            )


def test_a_class_name_occurs_once():
    """In the library and the lab together."""
    names: dict[str, list[str]] = {}
    for path in [*FILES, *sorted((TOP / "lab").rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names.setdefault(node.name, []).append(str(path.relative_to(TOP)))
    assert {name: where for name, where in names.items() if len(where) > 1} == {}


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


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_operations_choose_their_form(path):
    """Which kernels run is asked in ops/registry.py: elsewhere no variable of the environment and no Triton."""
    if room(path) != "ops":
        text = path.read_text()
        assert not any(word in text for word in ("ADAHOP_TRITON", "ADAHOP_REFERENCE", "on_gpu", "ops.fast"))
        assert not any(within(name, "triton") for name in imports(ast.parse(text)))
