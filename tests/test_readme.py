"""README: its Python runs, its commands run, its tables are true."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from adahop import cli
from adahop.datasets import DATASETS, FORMS, load
from adahop.methods import METHODS
from adahop.models import MODELS
from adahop.ops import DRAWS
from adahop.policies import POLICIES
from adahop.sum import ESTIMATORS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMAND_LINE = (ROOT / "docs" / "command-line.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("adahop ")]
LOCAL = ("digits",)
TINY = {
    "train": ["--epochs", "1", "--hidden", "8", "--sizes", "2,2"],
    "compare": ["--epochs", "1", "--hidden", "8", "--sizes", "2,2", "--runs", "1"],
    "variance": ["--epochs", "1", "--hidden", "8", "--sizes", "2,2", "--nodes", "16", "--repeats", "2"],
    "list": [],
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder in which the Python of the README has run, block after block, as a reader would."""
    folder = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        names: dict = {}
        for i, block in enumerate(blocks("python")):
            exec(compile(block, f"README.md, Python block {i + 1}", "exec"), names)
    return folder, names


def test_the_python_runs(desk):
    _, names = desk
    assert len(blocks("python")) >= 2 and names["result"].test > 0.9 and names["out"].shape == (1797, 10)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(command, desk, monkeypatch, capsys):
    """With tiny settings, and digits for what would be downloaded."""
    monkeypatch.chdir(desk[0])
    words = shlex.split(command, comments=True)[1:]
    for module in ("adahop.cli.train", "adahop_lab.comparing", "adahop.cli.variance"):
        monkeypatch.setattr(f"{module}.load", lambda name: load(name if name in LOCAL else "digits"))
    with pytest.raises(SystemExit) as left:
        cli.main([*words, *TINY[words[0]]])
    out = capsys.readouterr()
    assert not left.value.code, out.err
    if "--json" in words:
        example = json.loads(re.search(r"^```json\n(.*?)^```", COMMAND_LINE, re.MULTILINE | re.DOTALL)[1])
        said = json.loads(out.out.splitlines()[-1])
        assert list(said) == list(example) and list(said["runs"][0]) == list(example["runs"][0])


def test_the_commands_are_all_shown():
    assert {c.split()[1] for c in COMMANDS} <= set(cli.COMMANDS)


def rows(head: str) -> list[list[str]]:
    table = README.split(head, 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_table_of_methods_is_true():
    told = [row[:4] for row in rows("| method | family")]
    assert [["x", *row] for row in told] == [
        ["x", m.name, m.family, "yes" if m.unbiased else "no", m.state] for m in METHODS.values()
    ]


def test_everything_is_named():
    ways = re.search(r"So four choices combine:.*? × model", README, re.DOTALL)
    assert ways
    for name in (*POLICIES, *DRAWS, *ESTIMATORS):
        assert re.search(rf"(?<![\w+]){re.escape(name)}(?![\w+])", ways[0]), name
    for name in (*MODELS, *DATASETS, next(iter(FORMS))):
        assert f"`{name}`" in README, name


def test_it_is_short():
    assert len(README.splitlines()) < 150


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
