"""The calls of the table as JSON over HTTP, of services in the process and behind gRPC."""

import csv
import http.client
import io
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
from contract_rows import make_rows, make_run
from contract_scenarios import SERVING
from web_client import WebClient

from foretoken.api.simulator.v1 import simulator_service_pb2 as simulator_pb2
from foretoken.api.types.v1 import measurement_pb2
from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig, EndpointsConfig, ServerConfig
from foretoken.app.serve import serve_web, start_server
from foretoken.wire import codec
from foretoken.wire.message_json import message_to_json
from foretoken.wire.rpcs import TABLES

_JSON = "application/json"
_SERVICES = ("catalog", "predictor", "simulator")


@pytest.fixture(scope="module", params=[pytest.param("embedded", marks=pytest.mark.slow), "remote"])
def web(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[WebClient]:
    home = str(tmp_path_factory.mktemp("home"))
    config = AppConfig(home=home, server=ServerConfig(port=0, metrics_port=-1, http_port=0))
    with ExitStack() as stack:
        if request.param == "remote":
            running = start_server(
                _SERVICES, replace(config, server=replace(config.server, http_port=-1))
            )
            stack.callback(running.stop, config.server)
            there = dict.fromkeys(_SERVICES, f"127.0.0.1:{running.port}")
            config = replace(config, endpoints=EndpointsConfig(**there))
        composition = stack.enter_context(Composition(config))
        server = serve_web(config, _SERVICES, composition)
        stack.callback(server.close)
        yield WebClient(server.port)


def _serving() -> dict[str, Any]:
    request = simulator_pb2.CreateServingSimulationRequest()
    return message_to_json(codec.encode(SERVING, type(request.scenario)))


def test_every_rpc_of_the_table_has_a_route(web: WebClient) -> None:
    """An empty body is answered, or refused for what it lacks; none is unknown."""
    rpcs = [
        f"{table.short_name()}/{name}"
        for table in TABLES
        if table.short_name() in _SERVICES
        for name, line in table.lines().items()
        if line.is_idempotent
    ]
    answers = {rpc: web.post(f"/v1/{rpc}", {}) for rpc in rpcs}
    missing = [rpc for rpc, answer in answers.items() if b'"reason": "HTTP"' in answer.body]
    assert [] == missing
    assert 404 == web.post("/v1/catalog/no_such_rpc", {}).status


def test_rows_are_recorded_and_come_back_in_every_format(web: WebClient) -> None:
    rows = make_rows([8, 16, 32])
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    run = json.dumps(message_to_json(codec.encode(make_run("json-run"), measurement_pb2.Run)))
    receipts = web.send("POST", f"/v1/catalog/record?run={quote(run)}", sink.getvalue())
    assert [3] == [json.loads(line)["row_count"] for line in receipts.body.splitlines()]

    as_json = web.post("/v1/catalog/read_measurements", {"selection": {}}).json
    as_csv = web.post("/v1/catalog/read_measurements", {"selection": {}}, Accept="text/csv").body
    arrow = web.post(
        "/v1/catalog/read_measurements",
        {"selection": {}},
        Accept="application/vnd.apache.arrow.stream",
    ).body
    operators = rows.column("operator").to_pylist()
    assert operators == [row["operator"] for row in as_json]
    assert operators == [row["operator"] for row in csv.DictReader(io.StringIO(as_csv.decode()))]
    assert operators == pa.ipc.open_stream(arrow).read_all().column("operator").to_pylist()


def test_rows_are_json_whatever_they_hold(web: WebClient) -> None:
    """JSON has no words for what is not finite but texts: rows have them as messages do."""
    text = "select 'nan'::double as a, ['-inf'::double, 1.5] as b, 2 as \"c\"\"d\""
    rows = web.post("/v1/catalog/query_sql", {"text": text})
    assert [{"a": "NaN", "b": ["-Infinity", 1.5], 'c"d': 2}] == rows.json
    none = f"{text} limit 0"
    as_csv = web.post("/v1/catalog/query_sql", {"text": none}, Accept="text/csv").body
    assert [["a", "b", 'c"d']] == list(csv.reader(io.StringIO(as_csv.decode())))


def test_numbers_beyond_what_is_sent_are_refused(web: WebClient) -> None:
    large = "9" * 30
    run = quote(json.dumps(message_to_json(codec.encode(make_run("n"), measurement_pb2.Run))))
    record = web.send("POST", f"/v1/catalog/record?run={run}&batch_index={large}", b"x")
    assert (400, "batch_index") == (record.status, record.json["errors"][0]["field"])
    path = "/v1/simulator/watch_serving_search?job_id=none"
    events = web.get(path, Accept="text/event-stream", Last_Event_ID=large)
    assert (404, "UNKNOWN_JOB") == (events.status, events.json["reason"])


@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"scenario": ' * 5_000),
        *(b'{"scenario": 1}', b'{"scenario": {"seed": "x"}}', b'{"scenario": {"seed": 1.5}}'),
        b'{"scenario": {"seed": %s}}' % (b"9" * 5_000),
        b'{"scenario": {"model_ref": "\\ud800"}}',
    ],
    ids=lambda body: body[:32].decode(errors="replace"),
)
def test_what_is_no_request_is_refused_with_why(body: bytes, web: WebClient) -> None:
    path = "/v1/simulator/create_serving_simulation"
    answer = web.send("POST", path, body, Content_Type=_JSON)
    assert (400, True) == (answer.status, bool(answer.json["detail"]))


def test_a_body_that_is_not_packed_as_it_says_is_refused(web: WebClient) -> None:
    run = quote(json.dumps(message_to_json(codec.encode(make_run("packed"), measurement_pb2.Run))))
    for path in ("/v1/simulator/list_jobs", f"/v1/catalog/record?run={run}"):
        answer = web.send("POST", path, b"{}", Content_Type=_JSON, Content_Encoding="gzip")
        assert (400, "BODY") == (answer.status, answer.json["reason"])


def test_rows_that_are_cut_off_are_refused(web: WebClient) -> None:
    rows = make_rows([8, 16, 32])
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    run = quote(json.dumps(message_to_json(codec.encode(make_run("cut"), measurement_pb2.Run))))
    whole = sink.getvalue()
    for part in (1, len(whole) // 3, len(whole) // 2, len(whole) - 20):
        answer = web.send("POST", f"/v1/catalog/record?run={run}", whole[:part])
        assert (400, "INVALID_REQUEST") == (answer.status, answer.json["reason"]), part


def test_what_only_reads_takes_a_query_string(web: WebClient) -> None:
    asked = web.get("/v1/catalog/query_sql?text=" + quote("select 40 + 2 as answer"))
    read = web.get("/v1/catalog/read_measurements?selection.operator=no_such")
    posted = web.post("/v1/catalog/read_measurements", {"selection": {"operator": "no_such"}})
    # SQL is a right of its own, and so no mere reading.
    assert 405 == asked.status
    assert (read.status, read.body) == (posted.status, posted.body)
    assert [] == web.get("/v1/simulator/list_jobs?page_size=3").json["jobs"]


def test_a_job_is_watched_by_events_and_its_report_read(web: WebClient) -> None:
    job = web.call("simulator/create_serving_simulation", scenario=_serving())
    events = web.get(
        f"/v1/simulator/watch_job?job_id={job['job_id']}", Accept="text/event-stream"
    ).body.decode()
    kinds = [
        line.removeprefix("event: ") for line in events.splitlines() if line.startswith("event")
    ]
    states = [
        json.loads(line.removeprefix("data: ")).get("state")
        for line in events.splitlines()
        if line.startswith("data")
    ]
    report = web.call("simulator/get_serving_report", job_id=job["job_id"])
    lines = web.get(f"/v1/simulator/watch_job?job_id={job['job_id']}").body.splitlines()
    assert {"item"} == set(kinds[:-1])
    assert ("end", "JOB_STATE_SUCCEEDED") == (kinds[-1], states[-2])
    assert SERVING.workload.num_requests == report["request_count"]
    assert ["JOB_STATE_SUCCEEDED"] == [json.loads(line)["state"] for line in lines]


def test_a_violation_names_the_field_as_the_caller_wrote_it(web: WebClient) -> None:
    wrong = _serving()
    wrong["engine"] = {**wrong.get("engine", {}), "max_seq_count": -3}
    domain = web.post("/v1/simulator/create_serving_simulation", {"scenario": wrong})
    unknown = web.post("/v1/simulator/create_serving_simulation", {"scenario": {"devise": "a30"}})
    no_number = web.post("/v1/simulator/list_jobs", {"page_size": "many"})
    no_json = web.send(
        "POST", "/v1/simulator/list_jobs", b'{"page_size":', Content_Type="application/json"
    )
    found = [
        (answer.status, [error["field"] for error in answer.json.get("errors", [])])
        for answer in (domain, unknown, no_number, no_json)
    ]
    assert [
        (400, ["scenario.engine.max_seq_count"]),
        (400, ["scenario.devise"]),
        (400, ["page_size"]),
        (400, []),
    ] == found
    assert "application/problem+json; charset=utf-8" == domain.headers["Content-Type"]
    assert "did you mean device" in unknown.json["detail"]


def test_an_error_keeps_its_reason(web: WebClient) -> None:
    unknown = web.get("/v1/simulator/get_job?job_id=none")
    assert (404, "UNKNOWN_JOB") == (unknown.status, unknown.json["reason"])
    elsewhere = web.get("/v1/profiler/list_jobs")
    assert 404 == elsewhere.status


def test_a_watch_ends_where_its_caller_leaves(web: WebClient) -> None:
    """The thread of a watch comes back: of some who leave at once, another may watch."""
    job = web.call("simulator/create_serving_simulation", scenario=_serving())
    path = f"/v1/simulator/watch_job?job_id={job['job_id']}"
    for _ in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", web.port, timeout=30)
        connection.request("GET", path, headers={"Accept": "text/event-stream"})
        connection.getresponse().read(1)
        connection.close()
    assert b"event: end" in web.get(path, Accept="text/event-stream").body
