"""Files of rows: what is there is not run again, and a page gets a table between its marks."""

from __future__ import annotations

from operator import methodcaller
from urllib.parse import DefragResult  # a tuple with names that another process can import

import pytest

from adahop_lab.rows import Lines, markdown, read_rows, replaced

TASKS = [DefragResult("a", "1"), DefragResult("b", "2"), DefragResult("a", "1")]


@pytest.mark.parametrize("jobs", [0, 2])
def test_each_task_runs_once(tmp_path, jobs, capsys):
    path = tmp_path / "new" / "rows.jsonl"
    assert Lines(path, DefragResult._fields).fill(TASKS[:1], methodcaller("_asdict"))
    path.write_text(path.read_text() + '{"url": "b", "frag')  # killed while it wrote
    lines = Lines(path, DefragResult._fields)
    assert lines.fill(TASKS, methodcaller("_asdict"), jobs=jobs)
    assert read_rows(path) == [{"url": "a", "fragment": "1"}, {"url": "b", "fragment": "2"}]
    assert "1 runs are there, 1 to do\n1/1 b 2" in capsys.readouterr().out
    assert lines.rows[TASKS[1]] == {"url": "b", "fragment": "2"}


def test_no_run_begins_when_the_time_is_over(tmp_path):
    lines = Lines(tmp_path / "rows.jsonl", DefragResult._fields)
    assert not lines.fill(TASKS, methodcaller("_asdict"), seconds=0.0) and len(lines.rows) == 1
    assert lines.fill(TASKS[:1], methodcaller("_asdict"), seconds=0.0)


def test_a_table_between_the_marks_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- one: begin -->\nold\n<!-- one: end -->\nafter <!-- two: begin --><!-- two: end -->\n")
    replaced(page, "one", markdown(["a", "b"], [["1", "2"]]))
    table = "| a | b |\n|---|---|\n| 1 | 2 |"
    want = f"before\n<!-- one: begin -->\n\n{table}\n\n<!-- one: end -->\nafter <!-- two: begin --><!-- two: end -->\n"
    assert page.read_text() == want
