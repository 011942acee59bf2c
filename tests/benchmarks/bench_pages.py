"""How long a written page of 10^5 points and rows takes to load and to answer.

Needs Chromium and Playwright. Prints the seconds of its processor that the page's task takes, which
other programs on the machine change less than the clock's.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from many_points import NUM_MANY, render_many

# The least that people feel as a delay.
_GOAL_S = 0.2


def main() -> None:
    """Load the page and act on it as a reader would."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("skipped: playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("skipped: there is no Chromium on this machine")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = Path(folder) / "page.html"
        path.write_text(render_many(), encoding="utf-8")
        print(f"{NUM_MANY:,} points and rows: {path.stat().st_size / 1e6:.1f} MB")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        _act(browser.new_page(viewport={"width": 1280, "height": 900}), path.as_uri())
        browser.close()


def _act(page: Any, address: str) -> None:
    meter = page.context.new_cdp_session(page)
    meter.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy_s() -> float:
        found = meter.send("Performance.getMetrics")["metrics"]
        return float(next(item["value"] for item in found if item["name"] == "TaskDuration"))

    def take(name: str, action: Callable[[], object]) -> None:
        before = busy_s()
        action()
        page.wait_for_timeout(500)
        print(f"{name:10} {busy_s() - before:6.3f} CPU s of the page (goal {_GOAL_S})")

    page.goto(address)
    page.wait_for_function("document.querySelector('figure.chart').view")
    print(f"load       {busy_s():6.3f} CPU s of the page")
    box = page.locator(".plot").bounding_box()
    x, y = box["x"] + 400, box["y"] + 150
    rows = page.locator(".table:not(figure *)")
    page.mouse.move(x, y)
    page.keyboard.down("Shift")
    take("zoom", lambda: page.mouse.wheel(0, -800))
    page.keyboard.up("Shift")
    take("hover", lambda: page.mouse.move(x + 5, y + 5))
    take("sort", lambda: rows.locator("thead button").nth(1).click())
    take("filter", lambda: rows.locator("input").fill("row 99999"))


if __name__ == "__main__":
    main()
