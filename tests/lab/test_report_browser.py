"""The report in a real browser: it draws, its buttons and keys work, and nothing complains."""

from __future__ import annotations

import os
import shutil

import pytest
from results import write_cells, write_results

from adahop_lab.experiments.page import build

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[browser]'")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser():
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with sync_api.sync_playwright() as play:
        try:
            started = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        except sync_api.Error as e:
            pytest.skip(f"no Chromium could be started: {str(e).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    home = tmp_path_factory.mktemp("page")
    cells = write_cells(home / "runs")
    page, _ = build(write_results(cells, home / "results"), cells)
    (home / "report.html").write_text(page, encoding="utf-8")
    return (home / "report.html").as_uri()


@pytest.fixture
def visit(browser, url):
    """A page of some width; at the end nothing was said on the console and nothing asked of the network."""
    troubles, opened = [], []

    def go(width: int = 1200, scheme: str = "light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        page.on("console", lambda m: troubles.append(m.text))
        page.on("pageerror", lambda e: troubles.append(str(e)))
        page.on("request", lambda r: troubles.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
        page.goto(url)
        opened.append(context)
        return page

    yield go
    for context in opened:
        context.close()
    assert troubles == []


def test_everything_is_drawn(visit):
    page = visit()
    assert page.locator("h1").inner_text() == "adahop: results"
    assert page.locator("figure").count() == page.locator("figure svg.plot").count() == 4
    for at in range(4):
        assert page.locator("figure").nth(at).locator("path[data-name]").count() >= 2
    assert page.locator("table.matrix").count() == 1 and "not run here" in page.locator("table.matrix").inner_text()
    assert page.locator("#table2 .strip .paper").count() == 3 and page.locator("#table2 .strip .dot").count() == 12


def test_methods_can_be_toggled(visit):
    page = visit()
    figure = page.locator("#table2-cora-way")
    lines = figure.locator("path[data-name]")
    assert lines.count() == 4
    button = figure.get_by_role("button", name="FastGCN", exact=True)
    button.focus()
    page.keyboard.press("Enter")
    assert lines.count() == 3 and button.get_attribute("aria-pressed") == "false"
    assert button.evaluate("b => b === document.activeElement")  # the focus stays
    page.keyboard.press("Space")
    assert lines.count() == 4
    figure.get_by_role("button", name="none", exact=True).click()
    assert lines.count() == 0 and "No method is shown." in figure.inner_text()
    figure.get_by_role("button", name="all", exact=True).click()
    assert lines.count() == 4


def test_axes_can_be_changed(visit):
    page = visit()
    figure = page.locator("#table2-cora-way")
    shape = lambda: figure.locator("path[data-name]").first.get_attribute("d")  # noqa: E731
    seen = {shape()}
    assert "epoch" in figure.locator("svg.plot").inner_html()
    for name in ("seconds", "log x", "log y", "upper part"):
        figure.get_by_role("button", name=name, exact=True).click()
        seen.add(shape())
    assert len(seen) == 5 and "seconds of training" in figure.locator("svg.plot").inner_html()
    assert "NaN" not in figure.inner_html()


def test_values_by_mouse_and_by_key(visit):
    page = visit()
    figure = page.locator("#table2-cora-way")
    plot, tip = figure.locator("svg.plot"), figure.locator(".tip")
    assert tip.is_hidden()
    plot.hover()
    assert tip.is_visible() and "GCN-BS.M" in tip.inner_text() and "±" in tip.inner_text()
    page.mouse.move(0, 0)
    assert tip.is_hidden()
    plot.focus()
    page.keyboard.press("End")
    assert "epoch 20" in tip.inner_text()
    page.keyboard.press("ArrowLeft")
    assert "epoch 19" in tip.inner_text()
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_light_and_dark(visit):
    back = "getComputedStyle(document.body).backgroundColor"
    light, dark = visit(scheme="light"), visit(scheme="dark")
    assert light.evaluate(back) != dark.evaluate(back)
    assert light.locator("#theme").inner_text() == "Dark" and dark.locator("#theme").inner_text() == "Light"
    light.locator("#theme").click()
    assert light.evaluate(back) == dark.evaluate(back) and light.locator("#theme").inner_text() == "Light"


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_no_page_is_wider_than_its_screen(visit, width):
    page = visit(width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for box in (page.locator("figure").nth(i).bounding_box() for i in range(4)):
        assert box["x"] >= 0 and box["x"] + box["width"] <= width + 1


def test_runs_open_and_everything_has_a_name(visit):
    page = visit()
    page.locator("#table2 details.runs > summary").click()
    page.locator("#table2 details.runs details > summary").first.click()
    assert page.get_by_text("adahop reproduce table2 --datasets cora --rows graphsage --runs 3").is_visible()
    unnamed = "[...document.querySelectorAll('button')].filter(b => !b.textContent.trim()).length"
    assert page.evaluate(unnamed) == 0
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def test_print_has_the_plots_and_no_buttons(visit):
    page = visit(scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert page.locator("figure svg.plot").first.is_visible() and page.locator(".tools").first.is_hidden()
