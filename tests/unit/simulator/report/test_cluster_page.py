"""What a page and a trace say of the pools of a cluster."""

from dataclasses import replace

import pytest
from cluster_records import SCENARIO, build_record

from foretoken.domain.lowering.memory import ServingMemory
from foretoken.domain.results.report import (
    Percentiles,
    RequestColumns,
    SeriesColumns,
    ServingReport,
)
from foretoken.page.section import Section
from foretoken.simulator.perfetto import serving_trace
from foretoken.simulator.report.page import render_page, result_sections
from foretoken.simulator.report.serving_cluster import cluster_sections
from foretoken.simulator.serving.outcome import build_report
from foretoken.simulator.serving.step_cost import StepAccount
from foretoken.simulator.serving.tables import build_tables
from foretoken.wire import ipc

_MEMORY = ServingMemory(
    usable_bytes=70e9,
    weights_bytes=16e9,
    activations_bytes=2e9,
    kv_bytes_per_token=131072,
    device_bytes=80e9,
)


@pytest.fixture(scope="module")
def report() -> ServingReport:
    """Return the report of the small cluster with its columns."""
    record = build_record()
    account = StepAccount(
        time_s_by_group={"gemm": 0.1},
        time_s_by_provenance={"measured": 0.1},
        low_s=0.09,
        high_s=0.11,
        stage_busy_s=(0.1,),
    )
    tables = build_tables(record, SCENARIO)
    found = build_report(ServingReport(), SCENARIO, record, [account] * 3, [[_MEMORY]] * 2)
    return replace(
        found,
        requests=ipc.table_to_record(tables["requests"], RequestColumns),
        series=ipc.table_to_record(tables["series"], SeriesColumns),
    )


@pytest.fixture(scope="module")
def sections(report: ServingReport) -> list[Section]:
    """Return what the page of that report has."""
    return list(result_sections(report))


def _section(sections: list[Section], title: str) -> Section:
    return next(section for section in sections if section.title == title)


def test_a_column_of_the_table_is_a_pool(sections: list[Section]) -> None:
    """What no pool has, here replicas given up and adapters, has no row."""
    table = _section(sections, "Pools").table
    assert table is not None
    assert [column.title for column in table.columns] == ["pool", "first", "rest"]
    rows = {row[0]: tuple(row[1:]) for row in table.rows}
    assert rows["role"] == ("prefill", "decode")
    assert rows["replicas"] == ("1", "2")
    assert rows["replicas, mean"] == ("0.9", "1.6")
    assert rows["failures"] == ("1", "0")
    assert rows["replicas started"] == ("0", "1")
    assert not rows.keys() & {"replicas stopped", "adapters loaded"}


def test_replicas_that_failed_or_came_later_are_drawn_over_time(sections: list[Section]) -> None:
    """Three rows and the states they were in."""
    (chart,) = _section(sections, "Replicas").pictures
    assert {"first 0", "rest 1", "rest 2"} == set(chart.table.values("replica"))
    assert {"starting", "running", "restarting"} == set(chart.table.values("state"))


def test_replicas_that_only_ran_are_not_drawn(report: ServingReport) -> None:
    steady = replace(
        report, engines=tuple(engine for engine in report.engines if engine.engine == 1)
    )
    titles = [section.title for section in cluster_sections(steady, "load")]
    assert "Replicas" not in titles
    assert "Pools" in titles


def test_transfers_say_what_they_cost(sections: list[Section]) -> None:
    section = _section(sections, "KV transfers")
    assert "35 ms in the median" in section.intro
    assert section.table is not None
    assert [row[:2] for row in section.table.texts()] == [["first", "sends"], ["rest", "receives"]]


def test_pools_that_do_all_of_a_request_move_no_caches(
    report: ServingReport, sections: list[Section]
) -> None:
    """No figure of the page is about transfers then; of the others there are four."""
    aggregated = tuple(
        replace(pool, role="aggregated", sent_bytes_per_s=0.0) for pool in report.pools
    )
    changed = replace(report, pools=aggregated, transfer_ms=Percentiles())
    found = []
    for shown in (sections, result_sections(changed)):
        tables = [section.table for section in shown if section.table]
        rows = [str(row[0]) for table in tables for row in table.rows]
        found.append(sum("KV transfer" in name for name in rows))
    assert [4, 0] == found


def test_requests_that_were_not_served_have_their_reasons(sections: list[Section]) -> None:
    table = _section(sections, "Requests that were not served").table
    assert table is not None
    assert [row[1] for row in table.rows] == [1, 1]


def test_the_page_of_a_cluster_renders_whole(sections: list[Section]) -> None:
    page = render_page("cluster", sections)
    for title in ("Pools", "Replicas", "Load of the replicas", "KV transfers", "Memory"):
        assert f">{title}<" in page, title


def test_a_deployment_without_pools_has_no_such_sections(report: ServingReport) -> None:
    assert [] == cluster_sections(replace(report, pools=()), "load")


def test_the_trace_names_engines_by_pool_and_shows_transfers() -> None:
    tables = build_tables(build_record(), SCENARIO)
    events = serving_trace(tables["steps"], tables["requests"])["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["first engine 0", "rest engine 1", "rest engine 2", "requests"]
    moves = [
        (event["ph"], event["id"], event["ts"]) for event in events if event["name"] == "transfer"
    ]
    assert moves == [
        ("b", 0, pytest.approx(100e3)),
        ("e", 0, pytest.approx(120e3)),
        ("b", 4, pytest.approx(400e3)),
        ("e", 4, pytest.approx(450e3)),
    ]
    decodes = [event["ts"] for event in events if event["name"] == "decode" and "id" in event]
    assert decodes == pytest.approx([120e3, 180e3, 450e3, 500e3])
