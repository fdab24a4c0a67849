"""The report in a real browser: everything loads and is on the page."""

import pytest

from tests.chromium import WIDTH, chromium, fits


@pytest.fixture(scope="module")
def browser(report, tmp_path_factory):
    """Yields headless Chromium with the report open, 1280 pixels wide."""
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        driver.get((report / "report.html").as_uri())
        yield driver


SIZES = """return [...document.images].map(
    i => i.complete ? [i.naturalWidth, i.naturalHeight] : [0, 0])"""
# Cells of numbers without a badge over their column.
BARE = """return [...document.querySelectorAll('table')].flatMap(table => {
    const badges = [...table.tHead.rows[0].cells].flatMap(
        c => Array(c.colSpan).fill(c.querySelector('.badge')?.checkVisibility() ?? c.innerText));
    return [...table.tBodies[0].rows].flatMap(r => [...r.cells].filter(
        (c, i) => c.className.match(/closed_form|measured|compiled|paper/) && badges[i] !== true)
    ).map(c => c.innerText); })"""
# Sections with a table that must be scrolled sideways.
CUT = """return [...document.querySelectorAll('section')].filter(
    s => s.id != 'hostile' && [...s.querySelectorAll('.scroll')].some(
        d => d.scrollWidth > d.clientWidth)).map(s => s.id)"""


def test_all_figures_load_and_nothing_is_complained_of(browser, report):
    assert browser.title == "The paper, reproduced"
    assert browser.get_log("browser") == []
    sizes = browser.execute_script(SIZES)
    assert len(sizes) == len(list((report / "figures").glob("*.svg"))) == 5
    assert all(map(all, sizes))


def test_every_number_is_under_a_visible_badge(browser):
    assert browser.execute_script(BARE) == []
    # No table is cut.
    assert browser.execute_script(CUT) == []


@pytest.mark.parametrize("width", [WIDTH, 420])
def test_nothing_is_wider_than_the_window(browser, width):
    assert fits(browser, width)
