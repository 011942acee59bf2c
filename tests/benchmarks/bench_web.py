"""What the pages weigh and take: a first load, a question to its files, every view as a picture.

Needs Chromium and Playwright. Answers rest on the starter catalog, where it is installed. With a
folder as argument, pictures of the views are written there, of phones and desks, light and dark.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretoken.app.config import AppConfig, process_environment
from foretoken.app.starter import with_starter

sys.path.append(str(Path(__file__).resolve().parents[1]))

from web_client import serve_home

_SERVICES = ("catalog", "predictor", "simulator")
_NUM_CANDIDATES = 100_000
_VIEWS = (
    "/",
    "/train",
    "/jobs",
    "/results",
    "/compare",
    "/catalog",
    "/catalog/curves",
    "/catalog/estimate",
    "/catalog/imports",
    "/catalog/sql",
    "/validate",
    "/validate/training",
)
_RANKED = "meet the limits; best"


def _timed(name: str, act: Callable[[], object]) -> None:
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    act()
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    print(f"{name:44} {wall_s:6.2f} s, {cpu_s:6.2f} CPU s of the server")


def _count_bytes(page: Any) -> Callable[[], float]:
    """Return what gives the KB that came over the wire since it was asked last."""
    seen = [0.0]
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.on("Network.loadingFinished", lambda one: seen.append(one["encodedDataLength"]))

    def take() -> float:
        kilobytes = sum(seen) / 1e3
        seen.clear()
        return kilobytes

    return take


def _journey(page: Any, address: str) -> str:
    """Print what a new user's way takes, and return the answer's path."""
    weigh = _count_bytes(page)
    _timed("first load", lambda: page.goto(address))
    print(f"{'  it weighs':44} {weigh():6.1f} KB compressed")

    def ask() -> None:
        page.get_by_role("button", name="Answer").click()
        page.get_by_text(_RANKED).wait_for(timeout=120_000)

    _timed("click 1: all candidates ranked", ask)
    print(f"{'  the answer weighs':44} {weigh():6.1f} KB compressed")
    whole = page.get_by_role("link", name="Show the whole answer")
    _timed("the best are simulated", lambda: whole.wait_for(timeout=300_000))
    whole.click()
    page.get_by_text(_RANKED).wait_for()

    def download() -> None:
        with page.expect_download():
            page.get_by_role("link", name="Download manifests").click()

    _timed("clicks 2 and 3: the manifests", download)
    return str(page.url)


def _interactions(page: Any, answer: str) -> None:
    """Print what ranking 10^5 candidates again takes in the browser."""
    page.goto(answer)
    columns = page.evaluate("async () => (await fetch(location.pathname + '/candidates')).json()")
    size = len(columns["rank"])
    places = [place % size for place in range(_NUM_CANDIDATES)]
    grown = {
        name: {**column, "at": [column["at"][place] for place in places]}
        if isinstance(column, dict)
        else [column[place] for place in places]
        for name, column in columns.items()
    }
    body = json.dumps(grown)
    page.route("**/candidates", lambda route: route.fulfill(body=body))
    page.goto(answer)
    page.get_by_text(_RANKED).wait_for(timeout=60_000)
    for what, script in {
        "a limit moved": "set('#c-tpot', 400, 'input')",
        "another objective": "set('#c-rank', 'latency', 'change')",
        "a filter by words": "set('#c-words', 'tp2', 'input')",
        "a column sorted": "document.querySelector('#candidates th:nth-child(8) button').click()",
    }.items():
        took_ms = page.evaluate(
            "() => { const set = (one, value, event) => { const place ="
            " document.querySelector(one); place.value = value;"
            " place.dispatchEvent(new Event(event)); }; const start = performance.now();"
            f" {script}; return performance.now() - start; }}"
        )
        print(f"{f'{_NUM_CANDIDATES:,} candidates: {what}':44} {took_ms:6.0f} ms")


def _pictures(browser: Any, address: str, answer: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for width, scheme in ((1280, "light"), (390, "dark")):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        for target in (*(f"{address.rstrip('/')}{view}" for view in _VIEWS), answer):
            page.goto(target)
            page.wait_for_timeout(500)
            name = "answer" if target == answer else target.removeprefix(address).replace("/", "-")
            path = folder / f"{name or 'ask'}-{width}-{scheme}.png"
            page.screenshot(path=path, full_page=True)
        context.close()
    print(f"pictures written to {folder}")


def main() -> None:
    """Print what was found."""
    from playwright.sync_api import sync_playwright

    config = with_starter(AppConfig(), process_environment())
    with (
        tempfile.TemporaryDirectory() as home,
        serve_home(Path(home), services=_SERVICES, predictor=config.predictor) as web,
        sync_playwright() as driver,
    ):
        # Set up, as `foretoken ui` does while one reads the form.
        web.get("/v1/simulator/list_jobs")
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        address = f"http://127.0.0.1:{web.port}/"
        page = browser.new_page()
        answer = _journey(page, address)
        _interactions(page, answer)
        page.close()
        if len(sys.argv) > 1:
            _pictures(browser, address, answer, Path(sys.argv[1]))
        browser.close()


if __name__ == "__main__":
    main()
