"""Reports as pages: what becomes of the Markdown, and what a real browser makes of it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import record as rec
from harness.render import render_study
from harness.render.page import PAGE_FILE, inline_svg, sort_key
from tests.harness import fake_records as fake
from tests.harness.test_committed import REPORTS

ROOT = Path(__file__).parents[2]

WIDTHS = (390, 1440)
"""A phone's and a desktop's, in CSS pixels."""


def make_page(folder: Path) -> Path:
    """A page with every figure but that of split counts, or with that one: its records decide."""
    render_study([folder], page=True)
    return folder / PAGE_FILE


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = {f"b{b}_4k": fake.problem([4096] * b) for b in (1, 4, 16, 64)}
    cases |= {"skew": fake.problem([131072, *[1024] * 63]), "mha": fake.problem([4096] * 4, heads=(32, 32))}
    faults = {("b4_4k", "flash-attn-3"): ("failed", "RuntimeError: <b>no</b> kernel & no image")}
    records = fake.gpu_records(cases, faults=faults)
    folder = fake.write(tmp_path_factory.mktemp("reports") / "study", records)
    rec.append(folder / "records-kernels.jsonl", *fake.profiled(records, run_id="run-9"))
    return make_page(folder)


@pytest.fixture(scope="module")
def splits_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_page(fake.write(tmp_path_factory.mktemp("reports") / "splits", fake.split_records()))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("6.95", "6.95"),
        ("3,525", "3525"),
        ("4.19 MB", "4.19e+06"),
        ("1.07 GB", "1.07e+09"),
        ("1.167× [1.165, 1.168] over 17 of 17", "1.167"),
        ("38.0 % (b1_1k)", "38.0"),
        ("2.2e-03", "2.2e-03"),
        ("-0.5", "-0.5"),
        ("–", ""),
        ("failed", ""),
    ],
)
def test_cells_of_numbers_are_sorted_by_their_first_number(text: str, key: str) -> None:
    assert sort_key(text) == key


def test_ids_of_two_figures_differ_and_marks_say_their_measurement() -> None:
    svg = (
        '<?xml version="1.0"?>\n<!DOCTYPE svg>\n<svg width="9"><metadata>x</metadata><g clip-path="url(#p1)">'
        '<a xlink:href="../README.md#r7" target="_blank"><use xlink:href="#m1"/></a></g><path id="m1"/></svg>'
    )
    assert inline_svg(svg, "share", "a & b", {"r7": "1 < 2"}) == (
        '<svg role="img" aria-label="a &amp; b" width="9"><g clip-path="url(#share-p1)"><a xlink:href="#r7">'
        '<title>1 &lt; 2</title><use xlink:href="#share-m1"/></a></g><path id="share-m1"/></svg>'
    )


@pytest.mark.pinned
def test_a_page_stands_alone(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    body = re.sub(r'import\("data:[^"]+"\)|<style>.*?</style>', "", text, flags=re.DOTALL)
    assert not re.findall(r'(?:src|href)="https?:', body)
    assert not re.findall(r"<(?:link|script|img)[^>]+(?:src|href)=\"(?!data:)", body)
    assert "<b>no</b>" not in body
    assert "&lt;b&gt;no&lt;/b&gt; kernel &amp; no image" in body
    ids = re.findall(r'\bid="([^"]+)"', body)
    assert len(ids) == len(set(ids))


@pytest.mark.pinned
def test_a_page_without_its_library_says_what_to_install(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("harness.render.page.files", missing)
    with pytest.raises(ImportError, match=re.escape("a page needs itables: pip install '.[html]'")):
        render_study([page.parent], page=True)


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, both from Debian; a missing one is a failure."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    assert all(programs.values()), f"expected Debian's chromium and chromium-driver, got {programs}"
    options = Options()
    options.binary_location = programs["chromium"] or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(programs["chromedriver"]))
    yield driver
    driver.quit()


def show(browser: Any, page: Path, width: int) -> None:
    """Load a page at a width in CSS pixels, and wait until its script is through."""
    from selenium.webdriver.support.ui import WebDriverWait

    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get_log("browser")  # what an earlier page said
    browser.get(page.as_uri())
    WebDriverWait(browser, 60).until(lambda b: b.execute_script("return document.body.dataset.ready === 'yes'"))
    assert browser.execute_script("return window.innerWidth") == width


@pytest.mark.browser
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["page", "splits_page"])
def test_a_page_loads_quietly_and_shows_every_figure(
    browser: Any, name: str, width: int, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    show(browser, path, width)
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    figures = browser.execute_script(
        "return [...document.querySelectorAll('figure')].map(f => { const s = f.querySelector('svg');"
        " const b = s.getBoundingClientRect(); return [f.id, b.width, b.height, getComputedStyle(s).visibility]; })"
    )
    drawn = sorted(file.stem for file in (path.parent / "figures").glob("*.svg"))
    assert sorted(figure[0].removeprefix("figure-") for figure in figures) == drawn
    for figure, wide, tall, visibility in figures:
        assert wide >= 600, f"{figure}: too small to read"
        assert tall > 100, figure
        assert visibility == "visible", figure


@pytest.mark.browser
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_is_readable_at_the_width_of(browser: Any, page: Path, width: int) -> None:
    """Nothing sticks out of the window; what is wider scrolls by itself, and texts have a size."""
    show(browser, page, width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    stuck = browser.execute_script(
        "return [...document.querySelectorAll('body > *')].filter(e => e.getBoundingClientRect().right >"
        " window.innerWidth + 1).map(e => e.tagName)"
    )
    assert stuck == []
    sizes = browser.execute_script(
        "return [...document.querySelectorAll('p, li, td, th')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 12
    # The smallest text of most figures is 7.5 points of a width of 648.
    narrowest = browser.execute_script(
        "return Math.min(...[...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect().width))"
    )
    assert 7.5 / 648 * narrowest >= 7


@pytest.mark.browser
def test_tables_sort_by_number_and_filter(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    show(browser, page, 1440)
    wait = WebDriverWait(browser, 20)  # a table is sorted and filtered a moment after it was asked to be
    table = browser.execute_script(
        "return [...document.querySelectorAll('table')].find(t => t.tHead.textContent.includes('interval'))"
    )
    header = next(th for th in table.find_elements(By.CSS_SELECTOR, "thead th") if th.text.strip() == "µs")
    place = browser.execute_script("return arguments[0].cellIndex", header)

    def times() -> list[float]:
        cells = browser.execute_script(
            "return [...arguments[0].tBodies[0].rows].map(r => r.cells[arguments[1]].textContent)", table, place
        )
        return [float(cell.replace(",", "")) for cell in cells if cell != "–"]

    before = times()
    assert before != sorted(before)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", header)
    header.click()
    wait.until(lambda _: times() == sorted(before))
    header.click()
    wait.until(lambda _: times() == sorted(before, reverse=True))

    search = browser.execute_script(
        "return arguments[0].closest('.dt-container').querySelector('input[type=search]')", table
    )

    def rows() -> list[str]:
        texts: list[str] = browser.execute_script(
            "return [...arguments[0].tBodies[0].rows].map(r => r.textContent)", table
        )
        return texts

    search.send_keys("torch-sdpa")
    wait.until(lambda _: len(rows()) == 6)
    assert all("torch-sdpa" in row for row in rows())
    search.send_keys(Keys.CONTROL, "a")
    search.send_keys(Keys.DELETE)
    wait.until(lambda _: len(rows()) == 6 * 7)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.browser
def test_a_mark_says_its_measurement_and_leads_to_its_line(browser: Any, page: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    show(browser, page, 1440)
    said = browser.execute_script(
        "return [...document.querySelectorAll('figure svg a')].map(a => [a.getAttribute('xlink:href'),"
        " a.querySelector('title')?.textContent ?? ''])"
    )
    assert len(said) > 200
    assert all(text for _, text in said)
    href, text = next(pair for pair in said if pair[1].startswith("triton-splitkv, b1_4k"))
    assert re.search(r"^\d+\.\d+ µs \[", text, flags=re.MULTILINE)
    assert "% of the bound" in text
    mark = browser.execute_script(
        "return [...document.querySelectorAll('#figure-share svg a')].find(a => a.getAttribute('xlink:href') ==="
        " arguments[0])",
        href,
    )
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", mark)
    mark.click()
    WebDriverWait(browser, 20).until(lambda b: b.execute_script("return document.querySelector(':target')"))
    row = browser.execute_script("return document.querySelector(':target').closest('tr').textContent")
    assert "triton-splitkv" in row
    assert "b1_4k" in row


@pytest.mark.browser
@pytest.mark.parametrize("study", REPORTS)
def test_committed_reports_make_pages(browser: Any, study: str, tmp_path: Path) -> None:
    folder = tmp_path / study
    shutil.copytree(ROOT / "reports" / study, folder)
    show(browser, make_page(folder), 1440)
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    tables = browser.execute_script("return document.querySelectorAll('table').length")
    assert browser.execute_script("return document.querySelectorAll('.dt-container table').length") == tables > 0
