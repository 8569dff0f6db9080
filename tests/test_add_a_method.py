"""The page on adding a method: its files and lines are run as printed, and keep the contract of every method."""

from __future__ import annotations

import ast
import doctest
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import adahop
import test_conformance
import test_house
from adahop import methods
from conftest import block_sum, full_sum, messy_graph, star, toy_data

PAGE = Path(__file__).parent.parent / "docs" / "add-a-method.md"
CODE = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
FILES = {re.match(r"# src/adahop/(\S+)\n", c)[1]: c for c in CODE if c.startswith("# src/adahop/")}
LINES = {ast.literal_eval(re.match(r"Method\((\S+),", c)[1]): c.strip() for c in CODE if c.startswith("Method(")}
CHECKS = {
    name: check
    for name, check in vars(test_conformance).items()
    if name.startswith("test_") and any("name" in mark.args[0] for mark in getattr(check, "pytestmark", []))
}


@pytest.fixture(params=LINES)
def method(request, monkeypatch) -> str:
    """The page's file run, and its line in the list, for the time of a test."""
    name = request.param
    source = FILES[f"samplers/{name}.py"]
    module = ModuleType(f"adahop.samplers.{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, f"samplers/{name}.py", "exec"), vars(module))
    monkeypatch.setitem(methods.METHODS, name, eval(LINES[name], {**vars(methods), **vars(module)}))
    return name


def test_the_page_holds_what_it_speaks_of():
    assert list(LINES) == ["degree", "fresh", "popular"]
    assert set(FILES) == {f"samplers/{name}.py" for name in LINES}
    assert len(CODE) == len(FILES) + len(LINES), "every block of code on the page is run"
    assert len(CHECKS) > 15


@pytest.mark.parametrize("path", FILES)
def test_files_keep_the_rules_of_the_house(path):
    source = FILES[path]
    assert len(source.splitlines()) < 100 and max(map(len, source.splitlines())) <= 120
    names = test_house.imports(ast.parse(source))
    assert not [n for n in names for rule in test_house.NEVER["samplers"] if test_house.within(n, rule)]


def test_examples_run(method):
    module = sys.modules[f"adahop.samplers.{method}"]
    tests = doctest.DocTestFinder().find(module, module.__name__, module, vars(module))
    assert sum(doctest.DocTestRunner().run(t).failed for t in tests) == 0


@pytest.mark.parametrize("check", CHECKS)
def test_it_keeps_the_contract(method, check, request):
    """Every check of every method, with all the cases it is run with there."""
    function, given = CHECKS[check], {"name": method}
    cases = [[]]
    for mark in function.pytestmark:
        words = mark.args[0]
        words = [w.strip() for w in words.split(",")] if isinstance(words, str) else list(words)
        if words != ["name"]:
            values = [v if len(words) > 1 else (v,) for v in mark.args[1]]
            cases.append([dict(zip(words, v, strict=True)) for v in values])
    wanted = function.__code__.co_varnames[: function.__code__.co_argcount]
    spread = {key for case in cases[1:] for key in case[0]}
    for fixture in set(wanted) - {"name"} - spread:
        given[fixture] = request.getfixturevalue(fixture)
    for case in itertools.product(*cases[1:]):
        function(**given, **{k: v for part in case for k, v in part.items()})


def test_unbiased(method):
    graph = messy_graph().normalized("row")
    h = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    family = methods.METHODS[method].family
    sampler = adahop.make(method, graph, test_conformance.FAMILIES[family][:1])
    sums = []
    for _ in range(1500):
        blocks = sampler.sample(torch.arange(0, 60, 2))
        sampler.update(blocks, [b.scale for b in blocks])
        sums.append(block_sum(blocks[0], h))
    drawn, true = torch.stack(sums), full_sum(graph, h)[::2]
    error = drawn.std(0) / len(drawn) ** 0.5
    assert ((drawn.mean(0) - true).abs() <= 4.5 * error + 1e-6).all()
    assert (error > 1e-4).any(), "something was left to chance"


def test_the_model_learns(method):
    sizes = {"node-wise": (3, 3), "layer-wise": (40, 40)}[methods.METHODS[method].family]
    result = adahop.fit(toy_data(), method=method, sizes=sizes, epochs=8, hidden=16, batch_size=64, dropout=0.0)
    assert result.val > 0.6 and len(result.history) == 8


def test_degree_prefers_hubs():
    """Two neighbours, one of them a hub of in-degree 8: deg + 1 = 9 against 1, three to one for power 1/2."""
    vars_ = {"__name__": "degree_of_the_page"}
    exec(FILES["samplers/degree.py"], vars_)
    src = torch.cat([torch.tensor([1, 2]), torch.arange(3, 11)])
    dst = torch.cat([torch.tensor([0, 0]), torch.full((8,), 1)])
    graph = adahop.Graph.from_edge_index(torch.stack([src, dst]))
    sampler = vars_["degree"](graph, [1], draw="multinomial")
    sampler.policy.eta = 0.0
    drawn = torch.cat([sampler.sample([0])[0].n_id[1:] for _ in range(4000)])
    assert abs(float((drawn == 1).float().mean()) - 0.75) < 0.03


def test_fresh_comes_round():
    """k = 1 of 20 alike: who was just heard waits, so all are heard sooner than by uniform draws (72 on average)."""
    vars_ = {"__name__": "fresh_of_the_page"}
    exec(FILES["samplers/fresh.py"], vars_)
    times = []
    for seed in range(20):
        sampler, heard, t = vars_["fresh"](star(20), [1], seed=seed), set(), 0
        while len(heard) < 20:
            blocks = sampler.sample([0])
            sampler.update(blocks, [torch.ones(b.num_edges) for b in blocks])
            heard |= set(blocks[0].n_id[1:].tolist())
            t += 1
        times.append(t)
    assert sum(times) / 20 < 60
