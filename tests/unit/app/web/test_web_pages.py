"""The pages with real services: a question leads to an answer, its files and its result."""

import html
import io
import json
import re
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from web_client import TINY_CONFIG, Answer, WebClient, post_form, serve_home

from foretoken.app.config import ServerConfig
from foretoken.app.web.pages import VIEWS
from foretoken.domain.models.description import describe_model
from foretoken.domain.models.load import load_model

_EXAMPLES = Path(__file__).resolve().parents[4] / "docs" / "examples"
_QUESTION = {
    "model": "llama-3.1-8b",
    "devices": "h100_sxm",
    "gpus": "1",
    "isl": "64",
    "osl": "16",
    "tpot": "200ms",
    "mode": "aggregated",
    "batch": "4,8",
    "finalists": "1",
}
_CONFIG = {**TINY_CONFIG, "_name_or_path": "tiny<b>&"}


def _ask(web: WebClient, path: str = "/", **fields: str) -> Answer:
    form = urlencode({**_QUESTION, **fields})
    return web.send("POST", path, form, Content_Type="application/x-www-form-urlencoded")


def _wait(web: WebClient, job_id: str) -> dict[str, object]:
    path = f"/v1/simulator/watch_job?job_id={job_id}"
    last: dict[str, object] = json.loads(web.get(path).body.splitlines()[-1])
    return last


@pytest.fixture(scope="module")
def answered(web: WebClient) -> tuple[str, str]:
    """The job of a closed form, and that of its simulation, both done."""
    target = _ask(web).headers["Location"]
    found = re.fullmatch(r"/answers/([\w-]+)\?simulation=([\w-]+)", target)
    assert found is not None
    for job_id in found.groups():
        assert "JOB_STATE_SUCCEEDED" == _wait(web, job_id)["state"]
    return found[1], found[2]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebClient]:
    """A home in which nobody did anything, for who only looks."""
    with serve_home(tmp_path_factory.mktemp("empty")) as client:
        yield client


@pytest.mark.parametrize(
    "path",
    sorted(route.partition(" ")[2] for route in VIEWS if "{" not in route and "POST" not in route),
)
def test_every_page_says_something_when_there_is_nothing(path: str, empty: WebClient) -> None:
    """Of an empty home each page is there; what draws what is named says that nothing is."""
    shown = empty.get(path)
    if path in ("/compare/report", "/catalog/curves/report", "/catalog/sql/chart"):
        assert shown.status in (400, 404)
    else:
        assert 200 == shown.status
        assert len(shown.body) > 1


@pytest.mark.slow
def test_pages_that_wait_keep_no_other_from_being_shown(tmp_path: Path) -> None:
    """An answer that is not there yet is waited for, in one of the threads of that page."""
    config = ServerConfig(http_port=0, max_workers=1, max_queued_calls=0)
    long = {"model_ref": "llama-3.1-8b", "device": "h100_sxm", "workload": {"request_count": 10**6}}
    with serve_home(tmp_path, config) as web, ThreadPoolExecutor() as pool:
        job = web.call("simulator/create_serving_simulation", scenario=long)["job_id"]
        both = [pool.submit(web.get, f"/answers/{job}") for _ in range(2)]
        # One of the two waits for the job; there is no room for the other.
        busy = next(as_completed(both)).result()
        assert [429, 200] == [busy.status, web.get("/jobs").status]
        assert 200 in [waiting.result().status for waiting in both]
        web.call("simulator/cancel_job", job_id=job)


def test_a_question_is_answered_and_simulated(web: WebClient, answered: tuple[str, str]) -> None:
    quick, whole = answered
    page = web.get(f"/answers/{quick}?simulation={whole}").body.decode()
    columns = web.get(f"/answers/{whole}/candidates").json
    assert "None was simulated" not in page
    assert f'data-job="{whole}"' in page
    assert "llama-3.1-8b" in page
    names = [columns["name"]["words"][at] for at in columns["name"]["at"]]
    assert len(names) == len(columns["ttft_ms"]) == len(columns["rank"])
    assert min(rank for rank in columns["rank"] if rank) == 1


def test_the_answer_is_to_be_deployed_and_simulated_alone(
    web: WebClient, answered: tuple[str, str]
) -> None:
    whole = answered[1]
    page = web.get(f"/answers/{whole}").body.decode()
    name = html.unescape(re.search(r'name="name" value="([^"]+)"', page)[1])  # type: ignore[index]
    sent = web.get(f"/answers/{whole}/deployment?name={quote(name)}")
    files = zipfile.ZipFile(io.BytesIO(sent.body)).namelist()
    assert 'attachment; filename="deployment.zip"' == sent.headers["Content-Disposition"]
    assert "README.md" in files
    unknown = web.get(f"/answers/{whole}/deployment?name=no-such")
    assert 400 == unknown.status

    form = urlencode({"name": name})
    path = f"/answers/{whole}/simulate"
    started = web.send("POST", path, form, Content_Type="application/x-www-form-urlencoded")
    job_id = started.headers["Location"].rpartition("/")[2]
    assert "JOB_STATE_SUCCEEDED" == _wait(web, job_id)["state"]
    assert f"/results/{job_id}" == web.get(started.headers["Location"]).headers["Location"]
    assert b"<iframe" in web.get(f"/results/{job_id}").body
    assert [] != web.get(f"/results/{job_id}/trace").json["traceEvents"]
    assert 400 == web.get(f"/results/{whole}/trace").status


def test_a_report_runs_what_is_written_in_it_and_nothing_else(
    web: WebClient, answered: tuple[str, str]
) -> None:
    report = web.get(f"/results/{answered[0]}/report")
    policy = report.headers["Content-Security-Policy"]
    assert b"<html" in report.body
    assert "'sha256-" in policy
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy


def test_results_outlive_the_server(tmp_path: Path) -> None:
    with serve_home(tmp_path) as web:
        target = _ask(web, finalists="0").headers["Location"]
        job_id = target.rpartition("/")[2]
        _wait(web, job_id)
        deadline = time.monotonic() + 30
        while job_id.encode() not in web.get("/results").body and time.monotonic() < deadline:
            time.sleep(0.1)
    with serve_home(tmp_path) as web:
        assert 200 == web.get(target).status
        assert job_id.encode() in web.get("/results?q=llama").body
        assert b"No result has these words" in web.get("/results?q=no-such-model").body
        assert zipfile.is_zipfile(io.BytesIO(web.get(f"/results/{job_id}/file").body))


def test_two_results_are_compared(web: WebClient, answered: tuple[str, str]) -> None:
    query = "&".join(f"run={job_id}" for job_id in answered)
    assert b"Comparison" in web.get(f"/compare?{query}").body
    assert b"<html" in web.get(f"/compare/report?{query}").body
    assert b"Mark two to six" in web.get(f"/compare?run={answered[0]}").body


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": "llama-3.1-8bb"}, "llama-3.1-8b"),
        ({"devices": "h100_sxn"}, "h100_sxm"),
        ({"gpus": "0"}, "at least 1"),
        ({"isl": "many"}, "not a whole number"),
        ({"ttft": "soon"}, "soon"),
        ({"config": "/etc/passwd"}, "text of a config.json"),
        ({"model": "/etc/hostname"}, "no preset"),
    ],
)
def test_a_wrong_field_comes_back_with_what_is_wrong(
    web: WebClient, wrong: dict[str, str], said: str
) -> None:
    shown = _ask(web, **wrong)
    page = html.unescape(shown.body.decode())
    assert 400 == shown.status
    assert 'role="alert"' in page
    assert said in page
    # What was right stays filled in.
    assert 'value="64"' in page or "isl" in wrong


def test_a_pasted_model_is_served_and_its_name_shown_as_text(web: WebClient) -> None:
    target = _ask(web, config=json.dumps(_CONFIG), finalists="0").headers["Location"]
    _wait(web, target.rpartition("/")[2])
    page = web.get(target).body
    assert b"tiny&lt;b&gt;&amp;" in page
    assert b"tiny<b>" not in page


@pytest.mark.slow
def test_a_training_question_leads_to_its_job(web: WebClient) -> None:
    form = urlencode(
        {
            "model": "llama-3.1-8b",
            "devices": "h100_sxm",
            "gpus": "8",
            "global-batch-tokens": "65536",
            "sequence-length": "4096",
            "finalists": "2",
        }
    )
    started = web.send("POST", "/train", form, Content_Type="application/x-www-form-urlencoded")
    quick, _, whole = (
        started.headers["Location"].removeprefix("/strategies/").partition("?simulation=")
    )
    assert "JOB_STATE_SUCCEEDED" == _wait(web, quick)["state"]
    assert f'data-job="{whole}"' in web.get(started.headers["Location"]).body.decode()
    assert "JOB_STATE_SUCCEEDED" == _wait(web, whole)["state"]
    for path in (f"/jobs/simulator/{whole}", f"/results/{whole}"):
        assert f"/strategies/{whole}" == web.get(path).headers["Location"]
    assert {quick, whole} <= {job["job_id"] for job in web.get("/jobs/list").json}
    page = web.get(f"/strategies/{whole}").body.decode()
    assert "Why not the others" in page
    columns = web.get(f"/strategies/{whole}/candidates").json
    assert all(
        low <= value <= high
        for low, value, high in zip(
            columns["low"], columns["tokens_per_s_per_gpu"], columns["high"], strict=True
        )
    )
    assert min(columns["margin_gib"]) >= 0
    names = [html.unescape(name) for name in re.findall(r'name="name" value="([^"]+)"', page)]
    assert page.count(">Launch files<") + page.count("No launch files") == len(names) == 2
    for name in names:
        launched = web.get(f"/strategies/{whole}/launch?name={quote(name)}")
        is_written = f"launch?name={quote(name)}" in page
        assert (200 if is_written else 400) == launched.status
    alone = web.send(
        "POST",
        f"/strategies/{whole}/simulate",
        urlencode({"name": names[0]}),
        Content_Type="application/x-www-form-urlencoded",
    )
    alone_id = alone.headers["Location"].rpartition("/")[2]
    assert "JOB_STATE_SUCCEEDED" == _wait(web, alone_id)["state"]
    assert 400 == web.get(f"/strategies/{whole}/launch?name=none").status
    assert 400 == web.get(f"/strategies/{alone_id}").status


def test_sql_is_shown_as_text(web: WebClient) -> None:
    rows = web.get("/catalog/sql?q=" + quote("select '<script>' as hostile")).body
    wrong = web.get("/catalog/sql?q=" + quote("drop table measurements"))
    assert b"&lt;script&gt;" in rows
    assert b"<td><script>" not in rows
    assert 400 == wrong.status


def test_who_may_only_look_cannot_start(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("looker aaaa\n")
    config = ServerConfig(http_port=0, token_file=str(tokens), callers={"looker": ("reader",)})
    form = "application/x-www-form-urlencoded"
    with serve_home(tmp_path / "home", config) as web:
        signed = web.send("POST", "/sign-in", "token=aaaa", Content_Type=form)
        cookie = signed.headers["Set-Cookie"]
        shown = {"Cookie": cookie.partition(";")[0]}
        assert ("HttpOnly" in cookie, "SameSite=Strict" in cookie) == (True, True)
        assert 401 == web.send("POST", "/sign-in", "token=b", Content_Type=form).status
        assert 401 == web.get("/results").status
        assert 200 == web.get("/results", **shown).status
        asked = web.send("POST", "/", urlencode(_QUESTION), Content_Type=form, **shown)
        assert 403 == asked.status


def test_files_of_the_program_are_kept_by_browsers(web: WebClient) -> None:
    page = web.get("/").body.decode()
    address = re.search(r'href="(/static/\w+/pages.css)"', page)[1]  # type: ignore[index]
    sent = web.get(address, Accept_Encoding="gzip")
    assert "immutable" in sent.headers["Cache-Control"]
    assert "text/css; charset=utf-8" == sent.headers["Content-Type"]
    assert 404 == web.get("/static/0/no.js").status


def test_what_is_no_page_is_shown_to_browsers_as_a_page(web: WebClient) -> None:
    shown = web.get("/nothing", Accept="text/html,*/*")
    assert (404, True) == (shown.status, b"there is no page /nothing" in shown.body)
    assert "HTTP" == web.get("/nothing").json["reason"]


def test_a_question_that_fails_at_once_comes_back_with_why(web: WebClient) -> None:
    shown = _ask(web, correction="none-such")
    assert 400 == shown.status
    assert b"unknown correction &#39;none-such&#39;" in shown.body


def test_an_empty_trace_a_model_without_end_and_what_is_no_json_are_refused(web: WebClient) -> None:
    empty = post_form(web, "/check", _QUESTION, trace="")
    assert "is empty" in empty.json["trace"]
    deep = {"model_type": "llama", "num_hidden_layers": 10**9}
    checked = post_form(web, "/check", {**_QUESTION, "config": json.dumps(deep)})
    assert "num_hidden_layers: is more than 10,000" in checked.json[""]
    assert "config.json" in post_form(web, "/check", {**_QUESTION, "config": "{"}).json["config"]
    two = post_form(web, "/check", {**_QUESTION, "config": json.dumps(TINY_CONFIG) * 2})
    assert "more than one model" in two.json[""]


def test_a_form_says_where_files_hold_more_than_is_counted(web: WebClient) -> None:
    """The question stays as it is: the files are not read for it."""
    tiny = json.dumps(TINY_CONFIG)
    counted = round(describe_model(load_model(tiny)).num_bytes)

    def check(num_bytes: int | str, config: str = tiny) -> Any:
        given = {**_QUESTION, "config": config, "checkpoint-bytes": str(num_bytes)}
        return post_form(web, "/check", given).json

    assert {} == check(counted) == check("") == check("many") == check(2 * counted, "")
    assert "+100.0% of the" in check(2 * counted)["checkpoint-bytes"]


@pytest.mark.parametrize(
    "body", [b"no parts", b'--edge\r\nContent-Disposition: form-data; name="\xff"']
)
def test_a_form_that_cannot_be_read_is_refused(web: WebClient, body: bytes) -> None:
    form = "multipart/form-data; boundary=edge"
    page = web.send("POST", "/validate", body, Content_Type=form)
    assert (400, True) == (page.status, b"the form cannot be read" in page.body)
    assert 400 == web.send("POST", "/validate", b"", Content_Type="multipart/form-data").status


def _shown_fields(web: WebClient, path: str) -> dict[str, str]:
    """Return the form of a page as a browser would send it."""
    page = web.get(path).body.decode().partition('<form id="question"')[2]
    inputs = re.findall(r'<input [^>]*name="([\w-]+)" value="([^"]*)"[^>]*>', page)
    chosen = re.findall(r'<select id="f-([\w-]+)".*?</select>', page, re.DOTALL)
    assert chosen
    return {name: html.unescape(value) for name, value in inputs if value != "on"}


@pytest.mark.parametrize("path", ["/", "/train"])
def test_the_example_of_a_form_can_be_asked_as_it_stands(web: WebClient, path: str) -> None:
    fields = _shown_fields(web, path)
    check = "/check" if path == "/" else "/train/check"
    assert {} == post_form(web, check, fields).json
    assert "no preset" in post_form(web, check, {**fields, "model": "none"}).json["model"]


def test_what_is_wrong_is_named_by_the_fields_of_the_form(web: WebClient) -> None:
    checked = post_form(web, "/check", {**_QUESTION, "gpus": "0"})
    assert "at least 1" in checked.json["gpus"]
    spread = post_form(web, "/check", {**_QUESTION, "spread": "-1"})
    assert "from 0 to" in spread.json["spread"]
    listed = post_form(web, "/check", {**_QUESTION, "devices": "h20", "prices": "lambda"})
    assert "has no price of h20" in listed.json["prices"]
    nodes = {"model": "llama-3.1-8b", "subsets": "on", "gpus": "8", "devices": "h100_sxm"}
    assert "--nodes" in post_form(web, "/train/check", nodes).json["subsets"]


def test_prices_of_a_list_and_a_trace_are_part_of_the_question(web: WebClient) -> None:
    trace = "arrival_s,input_tokens,output_tokens\n0,64,8\n1,80,8\n"
    fields = {**_QUESTION, "prices": "lambda", "finalists": "0"}
    asked = post_form(web, "/", fields, trace=trace)
    job_id = asked.headers["Location"].rpartition("/")[2]
    assert "JOB_STATE_SUCCEEDED" == _wait(web, job_id)["state"]
    columns = web.get(f"/answers/{job_id}/candidates").json
    assert min(columns["usd_per_hour"]) > 0
    report = web.get(f"/v1/simulator/get_serving_search_report?job_id={job_id}").json
    workload = json.loads(report["request_json"])["scenario"]["workload"]
    assert ([64, 80], "") == (
        workload["trace_requests"]["num_prefill_tokens"],
        workload["trace_path"],
    )
    wrong = post_form(web, "/", fields, trace="no,trace\n1,2\n")
    assert (400, True) == (wrong.status, b"trace.csv" in wrong.body)


@pytest.mark.slow
def test_measurements_come_in_through_the_pages_and_are_looked_at(tmp_path: Path) -> None:
    """A table with its mapping: on the map, as curves, explained, queried, drawn and checked."""
    table = (_EXAMPLES / "collectives.csv").read_text("utf-8")
    mapping = (_EXAMPLES / "collectives-mapping.yaml").read_text("utf-8")
    with serve_home(tmp_path) as web:
        form = {"format": "generic"}
        begun = post_form(web, "/catalog/imports", form, file=table, mapping=mapping)
        path = begun.headers["Location"]
        while not (state := web.get(f"{path}/state").json)["is_final"]:
            time.sleep(0.02)
        assert ("succeeded", True) == (state["state"], state["lines"][0].startswith("4 rows"))
        assert b"4 rows" in web.get(path).body
        assert path in [job["address"] for job in web.get("/jobs/list").json]
        assert b"operator=all_reduce&amp;device=h100_sxm" in web.get("/catalog").body
        curves = "/catalog/curves?operator=all_reduce&device=h100_sxm"
        assert b"Curves of all_reduce" in web.get(curves).body
        report = web.get(curves.replace("curves?", "curves/report?"))
        assert (200, True) == (report.status, b"90 % interval" in report.body)
        call = "operator=gemm&device=h100_sxm&dims=m=64+n=64+k=64&dtype=bf16"
        assert b"rests on" in web.get(f"/catalog/estimate?{call}").body
        query = quote(
            "SELECT dims['message_bytes'] AS size, latency_us_median AS us FROM measurements"
        )
        shown = f"/catalog/sql/chart?q={query}&x=size&y=us&kind=lines"
        assert b"us over size" in web.get(shown).body
        assert 400 == web.get(shown.replace("kind=lines", "kind=pies")).status
        checked = post_form(web, "/catalog/check", {}).headers["Location"]
        assert "/jobs/catalog/check-" in checked
        while web.get(checked).status != 303:
            time.sleep(0.02)
        quality = web.get(checked).headers["Location"]
        assert b"Quality of measurements" in web.get(f"{quality}/report").body


def test_an_import_that_fails_says_why(web: WebClient) -> None:
    begun = post_form(web, "/catalog/imports", {"format": "nccl_tests"}, file="no,rows\n")
    path = begun.headers["Location"]
    while not (state := web.get(f"{path}/state").json)["is_final"]:
        time.sleep(0.02)
    assert ("failed", True) == (state["state"], "import in file.csv" in state["message"])
    assert b">Resume</button>" in web.get(path).body
    again = web.send("POST", f"{path}/resume", "", Content_Type="application/x-www-form-urlencoded")
    assert again.headers["Location"] not in ("", path)
    listed = {job["address"]: job for job in web.get("/jobs/list").json}
    assert (True, False) == (listed[path]["can_resume"], listed[path]["can_cancel"])
    assert b"choose a file" in post_form(web, "/catalog/imports", {"format": "fasop"}).body
    assert 404 == web.get("/catalog/imports/import-none").status


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("operator=gem&device=h100_sxm&dims=m=1", "gem"),
        ("operator=gemm&device=h100_sxm&dims=m=1&dtype=none", "none"),
        ("operator=gemm&device=h100_sxn&dims=m=1", "h100_sxm"),
        ("operator=gemm&device=h100_sxm&dims=m", "m"),
    ],
)
def test_an_estimate_that_cannot_be_says_why(web: WebClient, query: str, said: str) -> None:
    shown = web.get(f"/catalog/estimate?{query}")
    assert (400, True) == (shown.status, said in html.unescape(shown.body.decode()))


@pytest.mark.slow
def test_a_search_is_cancelled_and_resumed_from_the_list(web: WebClient) -> None:
    asked = _ask(web, gpus="4", batch="1:256", osl="64", finalists="12").headers["Location"]
    job_id = asked.rpartition("=")[2]
    listed = web.get("/jobs").body.decode()
    assert f'action="/jobs/simulator/{job_id}/cancel"' in listed
    form = "application/x-www-form-urlencoded"
    web.send("POST", f"/jobs/simulator/{job_id}/cancel", Content_Type=form)
    assert "JOB_STATE_CANCELLED" == _wait(web, job_id)["state"]
    assert f'action="/jobs/simulator/{job_id}/resume"' in web.get("/jobs").body.decode()
    assert b">Resume<" in web.get(f"/jobs/simulator/{job_id}").body
    resumed = web.send("POST", f"/jobs/simulator/{job_id}/resume", Content_Type=form)
    again = resumed.headers["Location"].rpartition("/")[2]
    assert "JOB_STATE_SUCCEEDED" == _wait(web, again)["state"]
