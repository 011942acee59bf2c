"""Comparisons with measured runs in the pages: kept under an address, calibrated in one click."""

import html
import json
from pathlib import Path

import pytest
from web_client import Answer, WebClient, post_form, serve_home

from foretoken.app.config import ServerConfig

_EXAMPLES = Path(__file__).resolve().parents[4] / "docs" / "examples"
_SERVED = {"model": "llama-3.1-8b", "device": "h100_sxm", "tp": "1"}
_TRAINED = {
    "model": "llama-2-7b",
    "device": "a100_sxm_80",
    "tp": "2",
    "pp": "2",
    "dp": "2",
    "global_batch_size": "8",
    "zero_stage": "1",
}
_FORM = "application/x-www-form-urlencoded"


def _validate(web: WebClient, content: str, **fields: str) -> Answer:
    return post_form(web, "/validate", {**_SERVED, **fields}, measured=content)


def _measured() -> str:
    return (_EXAMPLES / "measured-requests.csv").read_text("utf-8")


def test_a_comparison_has_an_address_that_outlives_the_server(tmp_path: Path) -> None:
    """Its page runs what is written in it, and the file that was measured is to be had again."""
    with serve_home(tmp_path) as web:
        address = _validate(web, _measured()).headers["Location"]
    with serve_home(tmp_path) as web:
        page = web.get(address)
        assert (200, True) == (page.status, b"Simulated against measured" in page.body)
        report = web.get(f"{address}/report")
        assert b"Decode steps" in report.body
        assert "'sha256-" in report.headers["Content-Security-Policy"]
        assert _measured().encode() == web.get(f"{address}/measured").body
        assert address.encode() in web.get("/validate").body
        assert 404 == web.get("/validate/validation-none").status
        assert 303 == web.send("POST", f"{address}/forget", "", Content_Type=_FORM).status
        assert 404 == web.get(address).status


def test_a_server_is_calibrated_in_one_click(web: WebClient) -> None:
    """The correction has the name that was given, and a question asked with it rests on it."""
    compared = _validate(web, _measured()).headers["Location"]
    posted = "correction=my-server"
    done = web.send("POST", f"{compared}/calibrate", posted, Content_Type=_FORM)
    assert 303 == done.status
    page = web.get(done.headers["Location"]).body
    assert b"correction: my-server" in page
    assert b"error then" in web.get(f"{done.headers['Location']}/report").body
    known = web.call("predictor/list_corrections")["corrections"]
    # Other tests of this server may have been here before.
    assert "my-server" in [one["name"] for one in known]
    asked = {"model": "llama-3.1-8b", "devices": "h100_sxm", "gpus": "1", "isl": "64", "osl": "16"}
    assert {} == post_form(web, "/check", {**asked, "correction": "my-server"}).json


def test_a_sweep_is_compared_load_by_load(web: WebClient) -> None:
    def request(start_s: float) -> dict[str, object]:
        timings = {
            "request_start": start_s,
            "first_token_iteration": start_s + 0.1,
            "last_token_iteration": start_s + 0.5,
        }
        return {"info": {"timings": timings}, "prompt_tokens": 64, "output_tokens": 20}

    benchmarks = [
        {
            "requests": {"successful": [request(10.0 + place / rate) for place in range(8)]},
            "config": {"strategy": {"type_": "constant", "rate": rate}},
        }
        for rate in (1.0, 4.0)
    ]
    address = _validate(web, json.dumps({"benchmarks": benchmarks})).headers["Location"]
    report = web.get(f"{address}/report").body
    assert b"All loads" in report
    assert b"constant 4/s: Figures" in report
    done = web.send("POST", f"{address}/calibrate", "correction=", Content_Type=_FORM)
    learned = web.get(f"{done.headers['Location']}/report").body
    assert b"Calibrated" in learned


def test_who_may_only_look_keeps_no_comparison(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("looker aaaa\nasker bbbb\n")
    callers = {"looker": ("reader",), "asker": ("planner",)}
    config = ServerConfig(http_port=0, token_file=str(tokens), callers=callers)
    with serve_home(tmp_path / "home", config) as web:
        status = {}
        for token in ("aaaa", "bbbb"):
            signed = web.send("POST", "/sign-in", f"token={token}", Content_Type=_FORM)
            cookie = signed.headers["Set-Cookie"].partition(";")[0]
            shown = post_form(web, "/validate", _SERVED, {"Cookie": cookie}, measured=_measured())
            status[token] = shown.status
        kept = shown.headers["Location"]
        forget = web.send("POST", f"{kept}/forget", "", Content_Type=_FORM, Cookie=cookie)
    assert {"aaaa": 403, "bbbb": 303} == status
    # That takes another right than to plan.
    assert 403 == forget.status


@pytest.mark.parametrize(
    ("content", "fields", "said"),
    [
        ("", {}, "choose the file"),
        ("no,run\n1,2\n", {}, "measured.csv"),
        ("arrival_s,input_tokens,output_tokens\n0,8,8\n", {"model": "/etc/hostname"}, "no preset"),
        ("arrival_s,input_tokens,output_tokens\n0,8,8\n", {"tp": "two"}, "not a whole number"),
    ],
)
def test_a_run_that_cannot_be_read_is_refused(
    web: WebClient, content: str, fields: dict[str, str], said: str
) -> None:
    page = _validate(web, content, **fields)
    assert (400, True) == (page.status, said in html.unescape(page.body.decode()))


@pytest.mark.parametrize("name", ["..", "x" * 300, "..\\\\..\\\\evil", "<b>", "é.csv"])
def test_a_measured_run_may_have_any_name(web: WebClient, name: str) -> None:
    file = f'Content-Disposition: form-data; name="measured"; filename="{name}"'
    fields = [f'Content-Disposition: form-data; name="{k}"\r\n\r\n{v}' for k, v in _SERVED.items()]
    parts = [*fields, f"{file}\r\nContent-Type: text/csv\r\n\r\nno,run\n1,2\n"]
    body = "".join(f"--edge\r\n{part}\r\n" for part in parts) + "--edge--\r\n"
    media = "multipart/form-data; boundary=edge"
    page = web.send("POST", "/validate", body.encode(), Content_Type=media)
    assert (400, True) == (page.status, "in no format known here" in page.body.decode())


def test_measured_steps_are_compared_and_calibrated_in_one_click(web: WebClient) -> None:
    measured = (_EXAMPLES / "measured-steps.csv").read_text("utf-8")
    compared = post_form(web, "/validate/training", _TRAINED, measured=measured)
    address = compared.headers["Location"]
    assert b"step_factor" not in web.get(f"{address}/report").body
    done = web.send("POST", f"{address}/calibrate", "", Content_Type=_FORM)
    assert b"step_factor" in web.get(done.headers["Location"]).body
    assert b"step_factor" in web.get(f"{done.headers['Location']}/report").body


@pytest.mark.parametrize(
    ("fields", "content", "said"),
    [
        ({}, "", "choose the file"),
        ({"tp": "two"}, "time_ms\n1\n", "not a whole number"),
        ({}, "no,steps\n1,2\n", "measured.csv"),
        ({"model": "/etc/hostname"}, "time_ms\n1\n", "no preset"),
        ({"recompute": "some"}, "time_ms\n1\n", "recompute"),
    ],
)
def test_measured_steps_that_cannot_be_compared_are_refused(
    web: WebClient, fields: dict[str, str], content: str, said: str
) -> None:
    shown = post_form(web, "/validate/training", {**_TRAINED, **fields}, measured=content)
    assert (400, True) == (shown.status, said in html.unescape(shown.body.decode()))
