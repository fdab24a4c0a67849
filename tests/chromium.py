"""Headless Chromium, for tests of pages."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
)
WIDTH = 1280
_WIDTHS = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """Yields a browser ``WIDTH`` pixels wide that logs console messages and requests."""
    options = webdriver.ChromeOptions()
    options.binary_location = _find("chromium", "google-chrome", "chromium-browser")
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(_find("chromedriver")))
    try:
        driver.set_window_size(WIDTH, 900)
        yield driver
    finally:
        driver.quit()


def fits(browser: webdriver.Chrome, width: int) -> bool:
    """Sets the window's width in pixels; returns True if nothing on the page is wider."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    whole, visible = browser.execute_script(_WIDTHS)
    return whole <= visible <= width


def requested(browser: webdriver.Chrome) -> set[str]:
    """Returns the network addresses that pages have requested since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m for m in messages if m["method"] == "Network.requestWillBeSent"]
    urls = {message["params"]["request"]["url"] for message in asked}
    return {url for url in urls if url.startswith(("http:", "https:", "ws:", "wss:"))}


def _find(*names: str) -> str:
    """Returns the path of the first installed program; fails the test if none is installed."""
    for name in names:
        if path := shutil.which(name):
            return path
    pytest.fail(
        f"no {names[0]} is installed: run scripts/test.sh, which installs it, or "
        "apt-get install chromium chromium-driver"
    )
