"""The page of a serving simulation that has everything a simulation tells."""

import json
import re
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from page_structure import marked, without_scripts
from serving_records import MS, TinyRequest, TinyRules, run_tiny_engines

from foretoken.domain import schema
from foretoken.domain.lowering.memory import ServingMemory
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.slo import Slo, SloClass
from foretoken.domain.results.report import (
    Feasibility,
    RequestColumns,
    SeriesColumns,
    ServingReport,
)
from foretoken.simulator.report.page import render_page, result_sections
from foretoken.simulator.report.serving_detail import distributions
from foretoken.simulator.report.serving_timeline import timeline, waterfall
from foretoken.simulator.serving.outcome import build_report
from foretoken.simulator.serving.step_cost import StepAccount
from foretoken.simulator.serving.tables import build_tables
from foretoken.wire import ipc

_SCENARIO = ServingScenario(
    model=find_model("llama-3-8b"),
    device="h100_sxm",
    slo=Slo(ttft_ms=300, tpot_ms=20),
    slo_classes=(SloClass(name="chat", slo=Slo(itl_ms=5)), SloClass(name="batch")),
    device_idle_w=100,
    device_busy_w=700,
    device_usd_per_hour=3,
)
_MEMORY = ServingMemory(
    usable_bytes=70e9,
    weights_bytes=16e9,
    activations_bytes=2e9,
    kv_bytes_per_token=131072,
    device_bytes=80e9,
)


def _build(gap_ms: int) -> ServingReport:
    """Return the report of a run whose requests come that far apart, the third is refused."""
    requests = [
        TinyRequest(
            arrival_ns=gap_ms * i * MS, prompt=9, answer=5 if i != 2 else 0, slo_class=i % 3 - 1
        )
        for i in range(20)
    ]
    record = run_tiny_engines(requests, TinyRules(preempt_every=7))
    busy_s = float(np.sum(record.steps[0].end_ns - record.steps[0].start_ns)) / 1e9
    account = StepAccount(
        time_s_by_group={"gemm": 0.8 * busy_s, "attention": 0.2 * busy_s},
        time_s_by_provenance={"measured": busy_s},
        low_s=0.9 * busy_s,
        high_s=1.1 * busy_s,
        stage_busy_s=(busy_s,),
    )
    report = ServingReport(scenario_json=json.dumps(schema.encode(_SCENARIO)))
    report = build_report(report, _SCENARIO, record, [account], [[_MEMORY]])
    tables = build_tables(record, _SCENARIO)
    return replace(
        report,
        requests=ipc.table_to_record(tables["requests"], RequestColumns),
        series=ipc.table_to_record(tables["series"], SeriesColumns),
    )


@pytest.fixture(scope="module")
def page() -> str:
    page = render_page("llama-3-8b on h100_sxm", result_sections(_build(20), _build(90)))
    return without_scripts(page)


def test_a_whole_simulation_has_every_section(page: str) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        "Serving",
        "Latency against load",
        "Throughput and goodput",
        "Numbers",
        "Classes",
        "Requests that were not served",
        "Distributions",
        "Where the time goes",
        "Percentiles",
        "Over time",
        "Single requests",
        "Steps",
        "Memory",
        "Devices",
        "Configuration",
    ]


def test_classes_show_who_misses_their_objectives(page: str) -> None:
    assert '<td class="tone-alert">0%</td>' in page
    assert "no limits" in page
    assert "no class" in page


def test_refused_requests_say_why(page: str) -> None:
    assert "prompt and answer are larger than the whole KV cache" in page


def test_a_run_of_refusals_only_says_so() -> None:
    refused = ServingReport(
        feasibility=Feasibility(is_feasible=False, reason="it serves none of the requests"),
        num_requests=3,
        num_refused_by_reason={"exceeds_kv_cache": 3},
    )
    titles = [section.title for section in result_sections(refused)]
    assert ["Serving", "Requests that were not served"] == titles[:2]
    warning = "This deployment cannot run: it serves none of the requests."
    assert warning == result_sections(refused)[0].warning


def test_prices_and_memory_are_told(page: str) -> None:
    assert "cost per million output tokens (USD)" in page
    assert "energy per output token (J)" in page
    assert "1,000 blocks of 4 tokens" in page
    assert "device: 74.5 GiB" in page


def test_without_prices_there_is_no_word_of_them() -> None:
    report = _build(20)
    free = {item.name: 0.0 for item in fields(report) if "usd" in item.name}
    report = replace(report, **free, power_w_mean=0.0)
    plain = without_scripts(render_page("", result_sections(report)))
    assert "USD" not in plain
    assert "power (W)" not in plain


def test_objectives_are_drawn_where_they_are() -> None:
    """Of requests without a class: time to first token and time per output token."""
    section = distributions({"20": _build(20)}, ["#000000"])
    assert ["TTFT, distribution", "TPOT, distribution"] == [
        chart.title for chart in section.pictures if marked(chart) == ["SLO"]
    ]


def test_a_long_series_is_drawn_in_fewer_steps_of_the_same_area() -> None:
    report = _build(20)
    num = 1500
    ones = np.ones(num)
    series = SeriesColumns(
        **{name: ones for name in SeriesColumns.__dataclass_fields__ if name != "start_s"},
        start_s=np.arange(num, dtype=np.float64),
    )
    section = timeline({"": replace(report, series=series)})
    assert "Every step of a curve is 3 s" in section.intro
    requests, *_ = section.pictures
    # Of two curves, with the end of the last interval.
    assert 2 * (num / 3 + 1) == len(requests.table.rows)
    assert {1.0} == set(requests.table.values("value"))


def test_the_figures_of_a_page_keep_their_size(page: str) -> None:
    assert len(page) < 600_000


def test_single_requests_are_drawn_by_what_they_did_when() -> None:
    """Bars of a request touch, from its arrival to its last token; the slowest are there."""
    report = _build(5)
    (section,) = waterfall(report)
    table = section.pictures[0].table
    spans: dict[object, list[tuple[float, float]]] = {}
    for row in table.rows:
        spans.setdefault(row[0], []).append((float(row[2]), float(row[3])))
    finished = np.flatnonzero(np.asarray(report.requests.finished_s) >= 0)
    assert {f"request {place + 1}" for place in finished} == set(spans)
    for name, bars in spans.items():
        place = int(str(name).split()[1]) - 1
        ends = (report.requests.arrival_s[place], report.requests.finished_s[place])
        assert ends == (bars[0][0], bars[-1][1])
        assert all(before[1] == after[0] for before, after in pairwise(bars))
    assert [] == waterfall(replace(report, requests=RequestColumns()))
