"""The page on your own policy or method: its files are run as printed, and keep the contract of every method."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import adahop
import test_conformance
from adahop import methods
from adahop.checks import InputError
from adahop.ops import Odds
from adahop.policies import POLICIES, Policy
from adahop.samplers import NeighborSampler
from conftest import block_sum, full_sum, messy_graph, toy_data

PAGE = Path(__file__).parent.parent / "docs" / "add-a-method.md"
CODE = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
FILES: dict[str, str] = {}
for code in CODE:  # a file may come in several pieces
    name = re.match(r"# (\S+)\.py|", code)[1] or "use"
    FILES[name] = FILES.get(name, "") + code
NAMES = ("inverse-degree", "largest", "popular")
CHECKS = {
    name: check
    for name, check in vars(test_conformance).items()
    if name.startswith("test_") and any("name" in mark.args[0] for mark in getattr(check, "pytestmark", []))
}


def run(name: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(FILES[name], f"{name}.py", "exec"), vars(module))
    return module


@pytest.fixture
def own():
    """What a test registers is forgotten after it."""
    lists = methods.METHODS, POLICIES
    before = [dict(known) for known in lists]
    yield
    for known, kept in zip(lists, before, strict=True):
        known.clear()
        known.update(kept)


@pytest.fixture
def page(own, monkeypatch):
    """The files of the page, imported."""
    for name in ("my_policies", "popular"):
        monkeypatch.setitem(sys.modules, name, run(name))


def test_the_page_holds_what_it_speaks_of():
    assert set(FILES) == {"my_policies", "use", "test_my_policies", "popular"}
    assert set(re.findall(r'^adahop.register\("(.*?)"', PAGE.read_text(), flags=re.M)) == set(NAMES)
    assert len(CHECKS) > 15


@pytest.mark.filterwarnings("ignore")
def test_it_is_used_as_printed(page):
    found = vars(run("use"))
    assert found["result"].test > 0.3 and found["loader"].sampler.policy.keep == 0.9
    assert type(found["other"].policy) is type(found["sampler"].policy) and found["other"].how == "poisson"
    assert next(iter(found["loader"])).scale.max() > 1


def test_its_tests_pass(page):
    tests = {name: test for name, test in vars(run("test_my_policies")).items() if name.startswith("test_")}
    assert len(tests) == 2
    for test in tests.values():
        test()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("method", NAMES)
def test_it_keeps_the_contract(page, method, check, request):
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


@pytest.mark.parametrize("method", NAMES)
def test_unbiased(page, method):
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


@pytest.mark.parametrize("method", NAMES)
def test_the_model_learns(page, method):
    sizes = {"node-wise": (3, 3), "layer-wise": (40, 40)}[methods.METHODS[method].family]
    result = adahop.fit(toy_data(), method=method, sizes=sizes, epochs=8, hidden=16, batch_size=64, dropout=0.0)
    assert result.val > 0.6 and len(result.history) == 8


def test_largest_prefers_large_messages(page):
    """Twenty neighbours, one of them ten times as large: it is drawn nearly always, and the mean stays."""
    graph = adahop.Graph.from_edge_index([list(range(1, 21)), [0] * 20])
    size = torch.ones(21)
    size[20] = 10.0
    sampler = adahop.make("largest", graph, [2])
    for _ in range(200):
        (block,) = sampler.sample([0])
        sampler.update([block], [(block.scale * size[block.n_id[block.src]]) ** 2])
    late = [20 in sampler.sample([0])[0].n_id for _ in range(100)]
    assert sum(late) > 60  # 10 of 100 with uniform draws


class Given(Policy):
    """Odds that a test sets."""

    said: object = None

    def odds(self, layer: int) -> Odds:
        return self.said(self.graph)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (lambda g: torch.ones(g.num_nodes), "`Given.odds` must be an Odds, got Tensor"),
        (lambda g: Odds(node=torch.ones(g.num_edges)), r"`node of Given.odds` must have shape (6,), got (5,)"),
        (lambda g: Odds(edge=torch.ones(g.num_nodes)), r"`edge of Given.odds` must have shape (5,), got (6,)"),
        (lambda g: Odds(node=1 / g.degree()), "`node of Given.odds` must be finite and not negative, got inf at 2"),
        (lambda g: Odds(edge=-torch.ones(5)), "`edge of Given.odds` must be finite and not negative, got -1.0 at 0"),
        (lambda g: Odds(eta=2.0), "`eta of Given.odds` must be a number in [0, 1], got 2.0"),
    ],
)
def test_odds_that_cannot_be_drawn_are_refused(own, monkeypatch, said, sentence):
    monkeypatch.setattr(Given, "said", staticmethod(said))
    with pytest.raises(InputError, match=re.escape(sentence)):
        adahop.register("given", Given)
    assert "given" not in methods.METHODS and "given" not in POLICIES
    graph = adahop.Graph.from_edge_index(methods.SMALL, num_nodes=6)
    with pytest.raises(InputError, match=re.escape(sentence)):
        NeighborSampler(graph, [2], Given(graph, 1))


def test_a_policy_has_the_layers_of_its_sampler():
    graph = adahop.Graph.from_edge_index(methods.SMALL, num_nodes=6)
    with pytest.raises(InputError, match="`policy` must have as many layers as `sizes`, 2, got 1"):
        NeighborSampler(graph, [2, 2], Policy(graph, 1))


def test_names_are_new_and_plain(own):
    for name in ("bs", "tracked", "Mine", "a:b", ""):
        with pytest.raises(InputError, match="`name` must be a new word"):
            adahop.register(name, Policy)
    made = Policy(adahop.Graph.from_edge_index(methods.SMALL, num_nodes=6), 1)
    with pytest.raises(InputError, match="`kind` must be a Policy class"):
        adahop.register("mine", made)
    adahop.register("mine", Policy, draw="poisson")
    adahop.register("mine", Policy, draw="multinomial")  # as in a notebook, where a cell runs again
    assert methods.METHODS["mine"].options == {"draw": "multinomial", "policy": "mine"}


def test_an_option_has_a_default(own):
    class Strict(Policy):
        def __init__(self, graph, layers, power):
            super().__init__(graph, layers)

    with pytest.raises(InputError, match="with a default for every option, got Strict"):
        adahop.register("strict", Strict)


def test_the_command_line_imports_plugins(tmp_path):
    (tmp_path / "my_policies.py").write_text(FILES["my_policies"])
    command = [sys.executable, "-m", "adahop", "list", "--json"]

    def said(plugins: str) -> subprocess.CompletedProcess:
        env = {**os.environ, "ADAHOP_PLUGINS": plugins}
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120)

    for plugins in ("my_policies.py", " my_policies ,"):
        names = [m["name"] for m in json.loads(said(plugins).stdout)["methods"]]
        assert names[-2:] == ["inverse-degree", "largest"]
    missing = said("nowhere.py")
    assert missing.returncode == 2
    assert "adahop: `ADAHOP_PLUGINS` must name modules or .py files that exist, got 'nowhere.py'" in missing.stderr
