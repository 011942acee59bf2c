"""What the pages weigh and take: a first load, a question to its files, every view.

Needs Chromium and Playwright. Answers rest on the starter catalog, where it is installed. Of each
view: how long it loads, what comes over the wire to a browser that has nothing yet, and the grave
findings of axe, where that is installed, on phones and desks, light and dark. With a folder as
argument, pictures of the views are written there.
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

from web_client import WebClient, post_form, serve_home

_EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
_NUM_CANDIDATES = 100_000
_VIEWS = {
    "ask": "/",
    "train": "/train",
    "answer": "/answers/{answer}",
    "strategies": "/strategies/{strategies}",
    "run-serving": "/results/{serving}",
    "run-training": "/results/{training}",
    "compare": "/compare?run={serving}&run={faster}",
    "compare-choose": "/compare",
    "jobs": "/jobs",
    "job": "/jobs/simulator/{stopped}",
    "results": "/results",
    "catalog": "/catalog",
    "curves": "/catalog/curves?operator=all_reduce&device=h100_sxm",
    "estimate": "/catalog/estimate?operator=gemm&device=h100_sxm&dims=m=64+n=64+k=64&dtype=bf16",
    "sql": "/catalog/sql?q=select+1+as+one",
    "quality": "/catalog/quality/{check}",
    "imports": "/catalog/imports",
    "import": "/catalog/imports/{imported}",
    "validate": "/validate",
    "validate-training": "/validate/training",
    "validated": "/validate/{validated}",
    "sign-in": "/sign-in",
}
_SHOWN = ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark"))
_GRAVE = {"serious", "critical"}
_RANKED = "meet the limits; best"
# How long a person looks at the form; its question is answered meanwhile.
_READING_S = 15


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
    start_s = time.perf_counter()
    weigh = _count_bytes(page)
    _timed("first load", lambda: page.goto(address))
    print(f"{'  it weighs':44} {weigh():6.1f} KB compressed")

    _timed(f"{_READING_S} s of reading the form", lambda: page.wait_for_timeout(1e3 * _READING_S))

    def ask() -> None:
        page.get_by_role("button", name="Answer").click()
        page.get_by_text(_RANKED).wait_for(timeout=120_000)

    _timed("click 1: all candidates ranked", ask)
    print(f"{'  which has a link to send after':44} {time.perf_counter() - start_s:6.2f} s")
    print(f"{'  the answer weighs':44} {weigh():6.1f} KB compressed")
    whole = page.get_by_role("link", name="Show the whole answer")
    _timed("the best are simulated", lambda: whole.wait_for(timeout=300_000))
    whole.click()
    page.get_by_text(_RANKED).wait_for()

    def download() -> None:
        with page.expect_download():
            page.get_by_role("link", name="Download manifests").click()

    _timed("clicks 2 and 3: the manifests", download)
    took_s = time.perf_counter() - start_s
    print(f"{'new user to shareable answer':44} {took_s:6.2f} s, 3 clicks to its manifests")
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


def _fill(web: WebClient, answer: str) -> dict[str, str]:
    """Do what makes something to see in every view, and return its names."""
    model = {"model_ref": "llama-3.1-8b", "device": "h100_sxm"}
    space = {"scenario": {**model, "global_batch_size": 64}, "space": {"device_count": [64]}}
    begun = {
        "strategies": web.call("simulator/create_training_search", request=space),
        "serving": web.call(
            "simulator/create_serving_simulation", scenario={**model, "workload": {"rate_rps": 2}}
        ),
        "faster": web.call(
            "simulator/create_serving_simulation", scenario={**model, "workload": {"rate_rps": 8}}
        ),
        "training": web.call("simulator/create_training_simulation", scenario=model),
        "check": web.call("catalog/create_check"),
        "stopped": web.call(
            "simulator/create_serving_simulation",
            scenario={**model, "workload": {"request_count": 10**6}},
        ),
    }
    names = {name: job["job_id"] for name, job in begun.items()}
    web.call("simulator/cancel_job", job_id=names["stopped"])
    for name, job_id in names.items():
        service = "catalog" if name == "check" else "simulator"
        web.get(f"/v1/{service}/watch_job?job_id={job_id}")
    measured = (_EXAMPLES / "measured-requests.csv").read_text("utf-8")
    server = {"model": "llama-3.1-8b", "device": "h100_sxm", "tp": "1"}
    compared = post_form(web, "/validate", server, measured=measured)
    table = (_EXAMPLES / "collectives.csv").read_text("utf-8")
    mapping = (_EXAMPLES / "collectives-mapping.yaml").read_text("utf-8")
    imported = post_form(
        web, "/catalog/imports", {"format": "generic"}, file=table, mapping=mapping
    )
    while not web.get(f"{imported.headers['Location']}/state").json["is_final"]:
        time.sleep(0.05)
    places = {"validated": compared, "imported": imported}
    names |= {name: one.headers["Location"].rpartition("/")[2] for name, one in places.items()}
    return {**names, "answer": answer.rpartition("/")[2].partition("?")[0]}


def _views(browser: Any, address: str, names: dict[str, str], folder: Path | None) -> None:
    """Print what each view takes, weighs and is found wrong with; write its pictures."""
    try:
        from axe_playwright_python.sync_playwright import Axe
    except ImportError:
        Axe = None  # noqa: N806 - the class is not there
        print("axe is not installed: nothing is said of accessibility")
    print(
        "| view | address | ms until loaded, at most | KB | grave findings |\n|---|---|---|---|---|"
    )
    total = 0
    for name, path in _VIEWS.items():
        took_ms, weight, wrong = 0.0, 0.0, 0
        for width, scheme in _SHOWN:
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True
            )
            page = context.new_page()
            weigh = _count_bytes(page)
            start_s = time.perf_counter()
            page.goto(address.rstrip("/") + path.format(**names))
            took_ms = max(took_ms, (time.perf_counter() - start_s) * 1e3)
            page.wait_for_timeout(500)
            weight = max(weight, weigh())
            if folder is not None:
                page.screenshot(path=folder / f"{name}-{width}-{scheme}.png", full_page=True)
            if Axe is not None:
                found = Axe().run(page).response["violations"]
                wrong += sum(one["impact"] in _GRAVE for one in found)
            context.close()
        total += wrong
        found = wrong if Axe else "-"
        print(f"| {name} | `{path}` | {took_ms:.0f} | {weight:.0f} | {found} |")
    print(f"{len(_VIEWS)} views, {len(_SHOWN)} ways each: {total} grave findings")
    if folder is not None:
        print(f"pictures written to {folder}")


def main() -> None:
    """Print what was found."""
    from playwright.sync_api import sync_playwright

    config = with_starter(AppConfig(), process_environment())
    with (
        tempfile.TemporaryDirectory() as home,
        serve_home(Path(home), predictor=config.predictor) as web,
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
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        _views(browser, address, _fill(web, answer), folder)
        browser.close()


if __name__ == "__main__":
    main()
