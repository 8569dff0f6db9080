"""The report's content: what it says, what it never says, and that it needs nothing but itself."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from results import write_cells, write_results

from adahop import cli
from adahop_lab.experiments.catalogue import EXPERIMENTS, cells_of
from adahop_lab.experiments.page import build
from adahop_lab.experiments.page.html import Html, tag


@pytest.fixture
def made(tmp_path):
    cells = write_cells(tmp_path / "runs")
    return write_results(cells, tmp_path / "results"), cells


@pytest.fixture
def page(made):
    return build(*made)[0]


def test_the_page_stands_alone(page):
    assert (
        not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", page)
        and "@import" not in page
        and "url(http" not in page
    )
    assert page.startswith("<!doctype html>") and 'name="viewport"' in page and 'lang="en"' in page


def test_ours_and_the_papers(page):
    text = html.unescape(re.sub(r"<[^>]+>", " ", page))
    assert "0.731 ± 0.014" in text and "0.855 ± 0.005" in text and "GCN-BS.M" in text
    assert re.search(r"GraphSAGE \(-0\.1\d\d\)\s*:\s*Told here\.", text)
    assert "cannot be told apart from" in text and "is ahead of" in text
    assert "rebuilt labels" in text and "48.4" in text and "a processor" in text
    assert "adahop reproduce table2 --datasets cora --rows gcn-bs --runs 3" in text
    assert "adahop reproduce sample-size --datasets ppi_rebuilt_labels --rows residual-gcn-bs-k10 --runs 3" in text


def test_what_was_not_run_is_no_number(page):
    reddit = page[page.index("<table") : page.index("</table>")]
    row = re.search(r"<tr><th[^>]*>GCN-BS</th>(.*?)</tr>", reddit)[1]
    ours = [re.sub(r"<small>.*?</small>", "", cell) for cell in re.findall(r"<td.*?</td>", row)]
    assert "0.85" in ours[0] and "not run here" in ours[1] and not re.search(r"\d", re.sub(r"<[^>]+>", "", ours[1]))
    ogb = page[page.index('id="ogb"') : page.index('id="regret"')]
    assert "not run here" in ogb and "0.782" in ogb  # the paper's figure alone


def test_the_order_at_one_k(page):
    part = page[page.index("residual GCN, k = 10") :]
    rows = re.findall(r"<tr><th[^>]*>([^<]*)</th>(.*?)</tr>", part[: part.index("</table>")])
    rows = rows[1:]  # the head
    assert {name for name, _ in rows} == {"GCN-BS", "LADIES", "GraphSAINT"}
    assert [">0.05<" in cells for name, cells in sorted(rows)] == [True, False, True]  # a subgraph has no such variance
    assert "Paper" not in part[: part.index("</table>")]


def test_names_are_escaped(page):
    assert "oracle &lt;b&gt;" in page and tag("p", "a<b", title='"') == '<p title="&quot;">a&lt;b</p>'
    assert tag("p", Html("<i>x</i>"), hidden=True, id=None) == "<p hidden><i>x</i></p>"


def test_a_difference_without_a_note_is_an_error(made, tmp_path, capsys):
    out, _ = made
    page = tmp_path / "page.html"
    for note, code in (("Told here.", 0), ("", 1)):
        cells = write_cells(tmp_path / f"cells{code}", note)
        with pytest.raises(SystemExit) as left:
            cli.main(["report", str(out), "-o", str(page), "--cells", str(cells)])
        assert left.value.code == code
        assert ("Unexplained" in page.read_text()) == bool(code)
    assert "must have a `note`, got none for table2/cora/graphsage" in capsys.readouterr().err


def test_a_folder_that_is_none(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["report", str(tmp_path / "no")])
    assert left.value.code == 2 and "`folder` must be a folder of results" in capsys.readouterr().err


def test_a_folder_without_results(tmp_path, capsys):
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit) as left:
        cli.main(["report", str(tmp_path), "-o", str(page), "--cells", str(write_cells(tmp_path / "runs"))])
    assert left.value.code == 2 and "must hold results of `adahop reproduce`" in capsys.readouterr().err
    assert not page.exists()


def test_no_results_at_all_is_a_page_too(tmp_path):
    page, loose = build(tmp_path, write_cells(tmp_path / "runs"))
    assert loose == [] and "0 of " in page and "not run here" in page


def test_the_committed_results_are_of_the_committed_cells():
    """Every result has a cell with the same settings, and the page of them all explains what it must."""
    root = Path(__file__).parents[2] / "lab"
    known = {cell.place: cell for name in EXPERIMENTS for cell in cells_of(name, root / "runs")}
    files = [p for p in sorted((root / "results").glob("*/*.json")) if not p.name.endswith(".times.json")]
    found = {(p.parent.name, p.stem, row["row"]): row for p in files for row in json.loads(p.read_text())["rows"]}
    assert len(files) == 23 and len(found) == 382 and sum(len(row["runs"]) for row in found.values()) == 933
    for place, facts in found.items():
        cell = known[Path(*place)]
        assert facts["settings"] == cell.settings and facts["name"] == cell.name, place
    assert not list((root / "results").glob("*/.*"))  # nothing half done
    assert build(root / "results", root / "runs")[1] == []
