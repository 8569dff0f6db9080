"""The documentation: its Python runs, its commands parse, its links lead somewhere, its tables are true."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

from adahop import cli
from adahop.methods import BUILT_IN, METHODS, parameters, policy_options
from adahop.models import MODELS
from adahop.ops import DRAWS
from adahop.policies import POLICIES
from adahop.sum import ESTIMATORS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
ELSEWHERE = {"add-a-method.md"}  # its blocks are whole files; test_add_a_method.py writes and runs them
BLOCK = re.compile(r"(<!-- skip(?P<why>[^>]*)-->\s*)?^```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """(line, code) of the Python blocks that are to run; one that is skipped says why."""
    found, text = [], page.read_text()
    for match in BLOCK.finditer(text):
        if match[1] is not None:
            assert len(match["why"].strip(": \n")) > 10, f"{page.name}: a skipped block must say why"
            continue
        found.append((text[: match.start("code")].count("\n"), match["code"]))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
@pytest.mark.filterwarnings("ignore")
def test_the_python_runs(page, tmp_path, monkeypatch):
    """Block after block, in one namespace, as a reader would."""
    if page.name in ELSEWHERE:
        pytest.skip("test_add_a_method.py runs it")
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": page.stem}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for line, code in blocks(page):
            exec(compile("\n" * line + code, str(page), "exec"), names)


def test_the_pages_have_python():
    for name in ("quickstart", "migration", "own-data", "how-a-batch-travels", "choosing", "maths", "errata"):
        assert blocks(DOCS / f"{name}.md"), name


def test_every_erratum_has_a_check():
    parts = re.split(r"^## ", (DOCS / "errata.md").read_text(), flags=re.MULTILINE)[1:]
    assert [part.split(".")[0] for part in parts] == [str(i) for i in range(1, 13)]
    for part in parts:
        assert "```python" in part and "assert" in part and "**Printed**" in part and "**adahop**" in part


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("matplotlib.pyplot.show", lambda *args, **options: None)
    book = json.loads((DOCS / "tour.ipynb").read_text())
    assert book["nbformat"] == 4 and all(not cell.get("outputs") for cell in book["cells"])
    names: dict = {}
    with torch.random.fork_rng(devices=[]):
        for i, cell in enumerate(book["cells"]):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"tour.ipynb, cell {i}", "exec"), names)
    assert "accuracy" in capsys.readouterr().out


def commands() -> list[str]:
    return sorted({line for line in shell() if line.startswith("adahop ")})


def shell() -> list[str]:
    """Every line of the pages' shell blocks, a continued one as one."""
    text = "\n".join(page.read_text() for page in PAGES)
    found = re.findall(r"^```(?:sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in found for line in re.sub(r"\\\n\s*", "", block).splitlines()]


def test_the_scripts_are_there():
    for line in shell():
        for path in re.findall(r"(?:lab/benchmarks|examples)/[\w/.-]+\.(?:py|sh)", line):
            assert (ROOT / path).exists(), line


@pytest.mark.parametrize("command", commands())
def test_the_commands_parse(command):
    """They run in test_readme.py and the tests of each command; here their flags must exist."""
    name, *words = shlex.split(command, comments=True)[1:]
    group = typer.main.get_command(cli.build([name]))
    if name == "bench":
        group, (name, *words) = group.commands[name], words
    group.commands[name].make_context(name, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        other = DOCS / path if path else page
        assert other.exists(), target
        assert not anchor or anchor in headings(other), target


def table_rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_the_ablation_repeats_the_measured_tables():
    """Rows of the page that also stand in the lab's tables have their figures; the two are about the same runs."""
    told, found = ((ROOT / path).read_text() for path in ("docs/ablation.md", "lab/docs/ablation.md"))
    shared = 0
    for title in ("The preset", "Attention"):
        part = re.search(rf"^## {title}$.*?(?=^## )", told, re.MULTILINE | re.DOTALL)[0]
        for name, *cells in table_rows(part):
            rows = [set(row) for row in table_rows(found) if row[0] == name and set(cells) - {""} <= set(row)]
            assert rows or not re.search(r"\d", "".join(cells)), (name, cells)
            shared += bool(rows)
    assert shared > 15


def test_the_half_table_repeats_the_measured_one():
    """`a → b, d` of the results page is a row of the lab's table."""
    told, found = ((ROOT / path).read_text() for path in ("docs/results.md", "lab/docs/results.md"))
    table = found.split("<!-- half: begin -->")[1].split("<!-- half: end -->")[0]
    rows = {(row[0], row[1]): row for row in table_rows(table)}
    seen = 0
    for graph, *cells in table_rows(told):
        for script, cell in zip(("SAGE", "GCN", "GAT"), cells, strict=False):
            if match := re.fullmatch(r"(\S+) → (\S+), (.*)", cell):
                row = rows[graph, script]
                assert row[2].startswith(match[1]) and row[3].startswith(match[2]) and row[4] == match[3], row
                seen += 1
    assert seen == len(rows) - 2 == 18  # its head and the line below


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", t.lower()).strip()) for t in titles}


def test_the_site_shows_every_page():
    nav = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {page.name for page in PAGES} <= set(nav) and len(nav) == len(set(nav))


def test_the_options_of_the_methods_are_all_listed():
    table = (DOCS / "command-line.md").read_text().split("### Options of the methods")[1].split("## Output")[0]
    left_out = {"graph", "sizes", "seed", "storage", "options", "features", "heads", "slope"}  # not for a user to set
    for method in (METHODS[name] for name in BUILT_IN & set(METHODS)):
        for name in set(parameters(method.build)) - left_out:
            assert f"`{name}`" in table, (method.name, name)
    for policy in BUILT_IN & set(POLICIES):
        for name in set(policy_options(policy)) - left_out:
            assert f"`{name}`" in table, (policy, name)


def test_choosing_names_everything():
    text = (DOCS / "choosing.md").read_text()
    for name in (*POLICIES, *DRAWS, *ESTIMATORS, *MODELS):
        assert re.search(rf"(?<![\w+-]){re.escape(name)}(?![\w+-])", text), name
    for name in re.findall(r"`([a-z.-]+)`", text.split("What this is based on")[0]):
        assert name in METHODS or name in MODELS, name
    for method in ("bs", "bs.m", "s-gcn", "graphsaint", "cluster-gcn"):
        assert METHODS[method].state in text, method
