"""The report in a real browser: nothing fails to load, and all is on the page."""

import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from spec_t5x.experiments import paper_tables

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
WIDTH = 1280


def find(*names: str) -> str:
    """The first program that is installed; a failure that says what to do if there is none."""
    for name in names:
        if path := shutil.which(name):
            return path
    pytest.fail(
        f"no {names[0]} is installed: run scripts/test.sh, which installs it, or "
        "apt-get install chromium chromium-driver"
    )


@pytest.fixture(scope="module")
def browser(report, tmp_path_factory):
    """Headless Chromium with the report open, 1280 pixels wide."""
    options = webdriver.ChromeOptions()
    options.binary_location = find("chromium", "google-chrome", "chromium-browser")
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(find("chromedriver")))
    try:
        driver.set_window_size(WIDTH, 900)
        driver.get((report / "report.html").as_uri())
        yield driver
    finally:
        driver.quit()


def cells(browser) -> list[list[list[str]]]:
    """The text of each cell of each row of each table's body, as it is shown."""
    return browser.execute_script(
        "return [...document.querySelectorAll('table')].map(t => [...t.tBodies[0].rows].map("
        "r => [...r.cells].map(c => c.innerText.trim())))"
    )


def test_nothing_is_complained_of(browser):
    assert browser.title == "The paper, reproduced"
    assert browser.get_log("browser") == []


def test_a_missing_image_would_be_seen(browser, report, tmp_path):
    # The two checks above and below bear: a page whose figures are gone fails both.
    alone = tmp_path / "report.html"
    alone.write_bytes((report / "report.html").read_bytes())
    browser.execute_script("window.open()")
    first, second = browser.window_handles
    browser.switch_to.window(second)
    try:
        browser.get(alone.as_uri())
        assert len(browser.get_log("browser")) == len(sizes(browser)) > 0
        assert not any(map(all, sizes(browser)))
    finally:
        browser.close()
        browser.switch_to.window(first)


def sizes(browser) -> list[list[int]]:
    """The own width and height of each image: 0 where it did not load."""
    return browser.execute_script(
        "return [...document.images].map(i => i.complete ? [i.naturalWidth, i.naturalHeight]"
        " : [0, 0])"
    )


def test_all_figures_load(browser, report):
    assert len(sizes(browser)) == len(list((report / "figures").glob("*.svg"))) == 5
    assert all(map(all, sizes(browser)))


def test_the_tables_have_the_papers_rows(browser):
    table_1, table_4, *_ = cells(browser)
    assert [row[:2] + row[4:6] for row in table_1] == [
        [f"{row.alpha:g}", str(row.gamma), f"{row.operations:.2f}", f"{row.speed:.2f}"]
        for row in paper_tables.TABLE_1
    ]
    # Ours are the same digits.
    assert all(row[2:4] == row[4:6] for row in table_1)
    assert [(row[0], row[1], row[8], row[9]) for row in table_4] == [
        (row.task, f"T5-{row.draft}", f"{row.expected:.1f}", f"{row.measured:.1f}")
        for row in paper_tables.TABLE_2
    ]


def test_every_number_stands_under_a_badge_that_is_seen(browser):
    for table in browser.find_elements(By.TAG_NAME, "table"):
        badges = table.find_elements(By.CSS_SELECTOR, "thead .badge")
        assert badges and all(badge.is_displayed() and badge.text for badge in badges)


def test_nothing_is_wider_than_the_window(browser):
    width, visible = browser.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert width <= visible <= WIDTH
    scrolled = browser.execute_script(
        "return [...document.querySelectorAll('section')].filter("
        "s => s.id != 'hostile' && [...s.querySelectorAll('.scroll')].some("
        "d => d.scrollWidth > d.clientWidth)).map(s => s.id)"
    )
    assert scrolled == []


def test_contents_lead_to_the_sections(browser):
    links = browser.find_elements(By.CSS_SELECTOR, "nav a")
    targets = [link.get_attribute("hash")[1:] for link in links]
    assert targets == [s.get_attribute("id") for s in browser.find_elements(By.TAG_NAME, "section")]
    links[-1].click()
    top = browser.execute_script(
        "return document.getElementById(arguments[0]).getBoundingClientRect().top", targets[-1]
    )
    assert -1 < top < 900
