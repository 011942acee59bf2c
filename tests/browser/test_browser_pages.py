"""The pages in a real browser: what people do there, what assistive technology finds there."""

import json
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
from browser_page import address_of, open_page
from web_client import TINY_CONFIG, WebClient, post_form, serve_home

from foretoken.app.config import ServerConfig

pytestmark = pytest.mark.slow

_EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
_QUESTION = {
    "model": "llama-3.1-8b",
    "devices": "h100_sxm",
    "gpus": "1",
    "isl": "64",
    "osl": "16",
    "tpot": "200ms",
    "mode": "aggregated",
    "batch": "4,8",
    "finalists": "2",
}
_HOSTILE = "<img src=x onerror=alert(1)>"
_CONFIG = {**TINY_CONFIG, "_name_or_path": _HOSTILE}
# What a page has to be free of; the lesser ones are advice.
_GRAVE = {"serious", "critical"}


def _ask(web: WebClient, **fields: str) -> tuple[str, str]:
    """Return the jobs of a closed form and of its simulation, both done."""
    form = urlencode({**_QUESTION, **fields})
    asked = web.send("POST", "/", form, Content_Type="application/x-www-form-urlencoded")
    quick, _, whole = asked.headers["Location"].removeprefix("/answers/").partition("?simulation=")
    for job_id in filter(None, (quick, whole)):
        web.get(f"/v1/simulator/watch_job?job_id={job_id}")
    return quick, whole


@pytest.fixture(scope="module")
def answered(web: WebClient) -> tuple[str, str]:
    return _ask(web)


@pytest.fixture(scope="module")
def simulated(web: WebClient, answered: tuple[str, str]) -> dict[str, str]:
    """Return jobs that are done: both of an answer, a search for strategies, a simulation."""
    strategies = web.call(
        "simulator/create_training_search",
        request={
            "scenario": {
                "model_ref": "llama-3.1-8b",
                "device": "h100_sxm",
                "global_batch_size": 16,
            },
            "space": {"device_count": [8]},
            "finalist_count": 1,
        },
    )
    scenario = {"model_ref": "llama-3.1-8b", "device": "h100_sxm", "workload": {"request_count": 9}}
    alone = web.call("simulator/create_serving_simulation", scenario=scenario)
    found = {"strategies": strategies["job_id"], "alone": alone["job_id"]}
    for job_id in found.values():
        web.get(f"/v1/simulator/watch_job?job_id={job_id}")
    server = {"model": "llama-3.1-8b", "device": "h100_sxm", "tp": "1"}
    measured = (_EXAMPLES / "measured-requests.csv").read_text("utf-8")
    compared = post_form(web, "/validate", server, measured=measured)
    found["validated"] = compared.headers["Location"].rpartition("/")[2]
    return found | dict(zip(("quick", "whole"), answered, strict=True))


def _fill(web: WebClient, page: Any) -> None:
    """Import some rows, as a user does."""
    page.goto(address_of(web, "/catalog/imports"))
    page.get_by_label("Whose").select_option("generic")
    page.get_by_label("File", exact=True).set_input_files(_EXAMPLES / "collectives.csv")
    mapping = page.get_by_label("Mapping of its columns")
    mapping.set_input_files(_EXAMPLES / "collectives-mapping.yaml")
    page.get_by_role("button", name="Import").click()
    # While they are stored it is "4 rows" too.
    page.get_by_text("Answers rest on it from now on").wait_for()


_VIEWS = (
    "/",
    "/train",
    "/?model=llama-3.1-8bb&isl=x",
    "/answers/{whole}",
    "/jobs",
    "/results",
    "/results?q=no-such",
    "/compare",
    "/compare?run={quick}&run={whole}",
    "/catalog",
    "/catalog/sql?q=select+1+as+one",
    "/catalog/sql?q=select+1+as+one,+2+as+two&x=one&y=two&kind=scatter",
    "/catalog/curves?operator=all_reduce&device=h100_sxm",
    "/catalog/estimate?operator=gemm&device=h100_sxm&dims=m%3D64+n%3D64+k%3D64&dtype=bf16",
    "/catalog/estimate?operator=gem&device=h100_sxm&dims=m",
    "/catalog/imports",
    "/validate",
    "/validate/training",
    "/strategies/{strategies}",
    "/validate/{validated}",
    "/results/{alone}",
    "/sign-in",
    "/answers/no-such",
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("path", _VIEWS)
def test_a_page_has_no_grave_barrier(
    browser: Any, web: WebClient, simulated: dict[str, str], path: str, width: int, scheme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not there")
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True
    )
    page = context.new_page()
    if "curves" in path:
        _fill(web, page)
    page.goto(address_of(web, path.format(**simulated)))
    page.wait_for_load_state("networkidle") if "/jobs" not in path else page.wait_for_load_state()
    found = axe.Axe().run(page).response["violations"]
    wide = page.evaluate("document.documentElement.scrollWidth")
    landmarks = page.locator("main").count()
    context.close()
    assert [] == [
        (one["id"], [node["html"] for node in one["nodes"]][:3])
        for one in found
        if one["impact"] in _GRAVE
    ]
    assert (True, 1) == (wide <= width, landmarks)


def test_a_new_user_asks_and_has_manifests(browser: Any, web: WebClient, tmp_path: Path) -> None:
    """The question as it stands there, changed in two fields; five clicks to the files."""
    with open_page(browser) as page:
        page.goto(address_of(web, "/"))
        page.get_by_label("How many there are").fill("1")
        page.get_by_label("Prompt tokens").fill("64")
        page.get_by_label("Answer tokens").fill("16")
        page.get_by_label("Time per output token, mean").fill("200ms")
        page.get_by_text("How much is computed").click()
        page.get_by_label("finalists").fill("1")
        page.get_by_role("button", name="Answer").click()
        page.wait_for_url("**/answers/**")
        page.get_by_text("meet the limits; best").wait_for()
        link = page.get_by_role("link", name="Show the whole answer")
        link.wait_for(timeout=120_000)
        link.click()
        with page.expect_download() as downloading:
            page.get_by_role("link", name="Download manifests").click()
        downloading.value.save_as(tmp_path / "deployment.zip")
        assert "README.md" in zipfile.ZipFile(tmp_path / "deployment.zip").namelist()


def test_limits_rank_again_and_the_link_shows_the_same(
    browser: Any, web: WebClient, answered: tuple[str, str]
) -> None:
    with open_page(browser) as page:
        page.goto(address_of(web, f"/answers/{answered[1]}"))
        counted = page.locator("#counted")
        counted.get_by_text("meet the limits").wait_for()
        page.locator("#c-tpot").evaluate(
            "one => { one.value = 0; one.dispatchEvent(new Event('input')); }"
        )
        counted.get_by_text("loosen one").wait_for()
        page.locator("#c-tpot").evaluate(
            "one => { one.value = 1000; one.dispatchEvent(new Event('input')); }"
        )
        page.get_by_label("USD an hour of one h100_sxm").fill("2.5")
        page.get_by_label("What ranks").select_option("cost")
        # What was changed last; the address has all of it then.
        page.wait_for_url("**rank=cost**")
        assert "price.h100_sxm=2.5" in urlsplit(page.url).query.split("&")
        shown, address = counted.inner_text(), page.url
        first = page.locator("#candidates tbody tr").first.inner_text()
    with open_page(browser) as other:
        other.goto(address)
        other.locator("#counted").get_by_text("meet the limits").wait_for()
        assert shown == other.locator("#counted").inner_text()
        assert first == other.locator("#candidates tbody tr").first.inner_text()


def test_an_answer_of_nothing_says_why_and_draws_no_empty_picture(
    browser: Any, web: WebClient
) -> None:
    quick, whole = _ask(web, model="llama-3.1-70b")
    with open_page(browser) as page:
        page.goto(address_of(web, f"/answers/{quick}?simulation={whole}"))
        page.get_by_text("None was simulated: nothing meets this.").wait_for()
        assert page.get_by_text("out of memory").is_visible()
        assert not page.locator("#scatter").is_visible()


def test_the_ties_that_are_counted_are_those_that_the_answer_names(
    browser: Any, web: WebClient, simulated: dict[str, str]
) -> None:
    """The error of a difference decides, not whether intervals overlap."""
    with open_page(browser) as page:
        page.goto(address_of(web, f"/strategies/{simulated['strategies']}"))
        counted = page.locator("#counted")
        counted.get_by_text("meet the limits").wait_for()
        said = counted.inner_text()
        spec = json.loads(page.locator("#controls").get_attribute("data-spec"))
        marked = page.locator("#candidates tbody tr").filter(has_text=" tie")
        names = set(marked.locator("th").all_inner_texts())
    ties = set(spec["ties"]) - {spec["best"]}
    assert said.endswith(f"; ties: {len(ties):,}")
    assert names <= ties


def test_a_page_says_that_its_report_is_being_made(
    browser: Any, web: WebClient, simulated: dict[str, str]
) -> None:
    with open_page(browser) as page:
        held: list[Any] = []
        page.route("**/report", lambda route: held.append(route))  # noqa: PLW0108
        page.goto(address_of(web, f"/results/{simulated['alone']}"), wait_until="commit")
        page.get_by_text("The report is being made").wait_for()
        while not held:
            page.wait_for_timeout(20)
        held[0].continue_()
        page.get_by_text("The report is being made").wait_for(state="detached")


def test_strategies_are_ranked_again_and_the_link_shows_the_same(
    browser: Any, web: WebClient, simulated: dict[str, str]
) -> None:
    """Under a limit of memory, by money, with what a whole run takes."""
    with open_page(browser) as page:
        page.goto(address_of(web, f"/strategies/{simulated['strategies']}"))
        counted = page.locator("#counted")
        counted.get_by_text("meet the limits").wait_for()
        page.locator("#c-memory").evaluate(
            "one => { one.value = 0; one.dispatchEvent(new Event('input')); }"
        )
        counted.get_by_text("loosen one").wait_for()
        page.locator("#c-memory").evaluate(
            "one => { one.value = 900; one.dispatchEvent(new Event('input')); }"
        )
        page.get_by_label("USD an hour of one h100_sxm").fill("2")
        page.get_by_label("Tokens of the whole run").fill("1e12")
        page.get_by_label("What ranks").select_option("cost")
        # What was changed last; the address has all of it then.
        page.wait_for_url("**rank=cost**")
        assert {"tokens=1e12", "price.h100_sxm=2"} <= {*urlsplit(page.url).query.split("&")}
        shown, address = counted.inner_text(), page.url
        first = page.locator("#candidates tbody tr").first.inner_text()
        days, usd = (float(text.replace(",", "")) for text in first.split("\t")[-2:])
        # Eight GPUs at 2 USD an hour.
        assert usd == pytest.approx(days * 24 * 8 * 2, rel=2e-3)
    with open_page(browser) as other:
        other.goto(address)
        other.locator("#counted").get_by_text("meet the limits").wait_for()
        assert shown == other.locator("#counted").inner_text()
        assert first == other.locator("#candidates tbody tr").first.inner_text()


def test_a_training_question_is_answered_and_then_simulated(browser: Any, web: WebClient) -> None:
    with open_page(browser) as page:
        page.goto(address_of(web, "/train"))
        page.get_by_label("How many", exact=True).fill("8")
        page.get_by_label("Tokens of a step").fill("65536")
        page.get_by_label("Framework").select_option("megatron-core")
        page.get_by_role("button", name="Answer").click()
        page.wait_for_url("**/strategies/**")
        page.locator("#counted").get_by_text("meet the limits").wait_for()
        whole = page.get_by_role("link", name="Show the whole answer")
        whole.wait_for(timeout=120_000)
        whole.click()
        with page.expect_download() as downloading:
            page.get_by_role("link", name="Download launch files").click()
        assert "training.zip" == downloading.value.suggested_filename


def test_a_table_sorts_by_keyboard(browser: Any, web: WebClient, answered: tuple[str, str]) -> None:
    with open_page(browser) as page:
        page.goto(address_of(web, f"/answers/{answered[1]}"))
        button = page.get_by_role("button", name="TPOT (ms)")
        button.focus()
        page.keyboard.press("Enter")
        cells = page.locator("#candidates tbody tr td:nth-of-type(7)").all_inner_texts()
        times = [float(text.replace(",", "")) for text in cells]
        assert sorted(times) == times
        assert "ascending" == page.locator("#candidates th[aria-sort]").get_attribute("aria-sort")


def test_a_job_is_followed_over_a_restart(browser: Any, tmp_path: Path) -> None:
    """The page says that the server is away, and goes to the result when the job is done."""
    with serve_home(tmp_path) as web:
        port = web.port
        form = urlencode(
            {**_QUESTION, "gpus": "4", "batch": "1:256", "osl": "256", "finalists": "60"}
        )
        asked = web.send("POST", "/", form, Content_Type="application/x-www-form-urlencoded")
        job_id = asked.headers["Location"].partition("?simulation=")[2]
        context = browser.new_context()
        page = context.new_page()
        page.goto(address_of(web, f"/jobs/simulator/{job_id}"))
        page.locator("#state").get_by_text("running").wait_for()
    page.get_by_text("The server is away").wait_for()
    with serve_home(tmp_path, ServerConfig(http_port=port)):
        page.wait_for_url(f"**/answers/{job_id}", timeout=180_000)
        page.get_by_role("heading", name="Simulated request by request").wait_for()
    context.close()


def test_names_of_others_are_shown_as_text(browser: Any, web: WebClient) -> None:
    """In pages of ours, in the report within a frame, and in the comparison."""
    quick, _ = _ask(web, config=json.dumps(_CONFIG), finalists="0")
    with open_page(browser) as page:
        for path in (f"/answers/{quick}", f"/results/{quick}/report", "/results", "/jobs"):
            page.goto(address_of(web, path))
            page.wait_for_timeout(300)
        assert page.locator("img").count() == 0
        page.goto(address_of(web, "/results"))
        assert _HOSTILE in page.locator("main").inner_text()


def test_a_hundred_thousand_candidates_are_ranked_again(
    browser: Any, web: WebClient, answered: tuple[str, str]
) -> None:
    """The columns of a small answer, each repeated until there are so many."""
    columns = web.get(f"/answers/{answered[1]}/candidates").json
    size = len(columns["rank"])

    def grow(column: Any) -> Any:
        if isinstance(column, dict):
            return {**column, "at": [column["at"][row % size] for row in range(100_000)]}
        return [column[row % size] for row in range(100_000)]

    body = json.dumps({name: grow(column) for name, column in columns.items()})
    with open_page(browser) as page:
        page.route("**/candidates", lambda route: route.fulfill(body=body))
        page.goto(address_of(web, f"/answers/{answered[1]}"))
        page.locator("#counted").get_by_text("of 100,000 meet the limits").wait_for()
        page.get_by_label("Filter by words").fill("no-such-words")
        page.locator("#counted").get_by_text("None of 100,000").wait_for()
        page.get_by_label("Filter by words").fill("h100")
        page.locator("#counted").get_by_text("of 100,000 meet the limits").wait_for()
        assert 200 == page.locator("#candidates tbody tr").count()


def test_the_form_says_what_is_wrong_while_it_is_filled_in(browser: Any, web: WebClient) -> None:
    with open_page(browser) as page:
        page.goto(address_of(web, "/"))
        count = page.get_by_label("How many there are")
        count.fill("0")
        page.get_by_text("must be at least 1").wait_for()
        assert "true" == count.get_attribute("aria-invalid")
        count.fill("2")
        page.get_by_text("must be at least 1").wait_for(state="detached")


def test_the_table_follows_what_is_zoomed_and_the_link_keeps_it(
    browser: Any, web: WebClient, answered: tuple[str, str]
) -> None:
    with open_page(browser) as page:
        page.goto(address_of(web, f"/answers/{answered[1]}"))
        page.locator("#counted").get_by_text("meet the limits").wait_for()
        before = page.locator("#candidates tbody tr").count()
        page.get_by_label("Show 90 % intervals").check()
        assert page.get_by_role("button", name="High").is_visible()
        page.locator("#scatter").focus()
        for _ in range(6):
            page.keyboard.press("+")
        page.locator("#zoomed").get_by_text("that is zoomed in").wait_for()
        zoomed = page.locator("#candidates tbody tr").count()
        assert zoomed < before
        page.wait_for_url("**zoom=**")
        page.reload()
        page.locator("#zoomed").get_by_text("that is zoomed in").wait_for()
        assert zoomed == page.locator("#candidates tbody tr").count()
        page.locator("#scatter").focus()
        page.keyboard.press("Escape")
        page.wait_for_url(lambda url: "zoom=" not in url)
        assert before == page.locator("#candidates tbody tr").count()


def test_a_measured_run_is_compared_calibrated_and_forgotten(browser: Any, web: WebClient) -> None:
    """Its address shows another browser the same."""
    with open_page(browser) as page, open_page(browser) as other:
        page.goto(address_of(web, "/validate"))
        page.get_by_label("Measured run").set_input_files(_EXAMPLES / "measured-requests.csv")
        page.get_by_role("button", name="Simulate and compare").click()
        page.wait_for_url("**/validate/validation-*")
        page.get_by_label("Name of the correction").fill("of-a-browser")
        compared = page.url
        page.get_by_role("button", name="Calibrate").click()
        page.get_by_text("correction: of-a-browser").wait_for()
        page.frame_locator("iframe.report").get_by_text("error then").first.wait_for()
        other.goto(page.url)
        other.get_by_text("correction: of-a-browser").wait_for()
        other.goto(compared)
        other.get_by_role("button", name="Forget").click()
        other.wait_for_url("**/validate")
        assert 0 == other.locator(f"a[href='{compared.partition(str(web.port))[2]}']").count()


def test_two_browsers_see_one_import(browser: Any, web: WebClient) -> None:
    """One brings rows in, the other finds the job and the map."""
    with open_page(browser) as one, open_page(browser) as other:
        _fill(web, one)
        other.goto(address_of(web, "/jobs"))
        other.get_by_role("link", name="import-").first.click()
        other.get_by_text("4 rows").wait_for()
        other.goto(address_of(web, "/catalog"))
        other.locator("a.cell").first.click()
        other.get_by_role("heading", name="What was measured").wait_for()
