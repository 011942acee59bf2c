"""A real Chromium, driven by Playwright; without one the tests of this folder are skipped."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


# Playwright's event loop runs in this thread as long as the browser, and no other may meanwhile.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next((path for name in _PROGRAMS if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"none of {', '.join(_PROGRAMS)} is on this machine")
    # Chromium refuses to run as root in its sandbox, as tests in a container do.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=program, args=arguments)
        yield running
        running.close()
