"""A serving simulation as Arrow tables."""

import io
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray
from pyarrow import csv, parquet
from serving_records import MS, TinyRequest, TinyRules, run_tiny_engines, tiny_runs

from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.slo import SloClass
from foretoken.domain.results.report import RequestColumns, SeriesColumns
from foretoken.simulator.serving.record import ServingRecord, StepRecord
from foretoken.simulator.serving.tables import build_tables, steps_table
from foretoken.wire import ipc

_SCENARIO = ServingScenario(
    model=find_model("llama-3-8b"),
    device="h100_sxm",
    slo_classes=(SloClass(name="chat"), SloClass(name="batch")),
    device_idle_w=100,
    device_busy_w=700,
)


def _record() -> ServingRecord:
    requests = [
        TinyRequest(arrival_ns=2 * MS, prompt=12, answer=3, slo_class=1),
        TinyRequest(arrival_ns=3 * MS, prompt=4, answer=1),
        TinyRequest(arrival_ns=4 * MS, prompt=4, answer=0, slo_class=0),
    ]
    return run_tiny_engines(requests, TinyRules(max_seqs=1))


def test_requests_have_their_times_in_seconds_and_their_latencies_in_milliseconds() -> None:
    first, second, refused = build_tables(_record(), _SCENARIO)["requests"].to_pylist()
    assert (first["arrival_s"], first["first_token_s"]) == (0.002, 0.024)
    assert (first["slo_class"], second["slo_class"], refused["slo_class"]) == ("batch", "", "chat")
    assert first["outcome"] == "completed"
    assert (first["ttft_ms"], first["e2e_latency_ms"], first["tpot_ms"]) == (22.0, 44.0, 11.0)
    assert (first["execution_ms"], first["preempted_ms"]) == (40.0, 4.0)
    assert second["tpot_ms"] is None
    assert (refused["outcome"], refused["finished_s"], refused["ttft_ms"]) == (
        "exceeds_kv_cache",
        -1.0,
        None,
    )


def test_steps_have_one_row_each_with_the_engine_they_ran_on() -> None:
    requests = [TinyRequest(arrival_ns=i * MS, prompt=5, answer=3) for i in range(4)]
    record = run_tiny_engines(requests, TinyRules(), 2)
    table = steps_table(record, _SCENARIO)
    engines = np.repeat([0, 1], [len(steps.end_ns) for steps in record.steps])
    assert table.column("engine").to_pylist() == engines.tolist()
    assert table.column("num_prefill_tokens").to_pylist()[0] == 5
    assert table.slice(0, 1).to_pylist()[0]["end_s"] == 0.011


def test_a_group_that_an_engine_never_ran_takes_no_time_there() -> None:
    requests = [TinyRequest(arrival_ns=i * MS, prompt=5, answer=3) for i in range(4)]
    record = run_tiny_engines(requests, TinyRules(), 2)

    def breakdown(steps: StepRecord) -> Mapping[str, NDArray[np.float64]]:
        times = np.full(len(steps.end_ns), 5.0)
        return {"gemm": times} if steps is record.steps[0] else {"gemm": times, "launch": times}

    table = steps_table(record, _SCENARIO, [breakdown])
    num_first = len(record.steps[0].end_ns)
    assert table.column("launch_us").to_pylist()[: num_first + 1] == [0.0] * num_first + [5.0]
    assert set(table.column("gemm_us").to_pylist()) == {5.0}


@settings(max_examples=40, deadline=None)
@given(run=tiny_runs())
def test_any_run_has_tables_that_make_the_columns_of_its_report(
    run: tuple[list[TinyRequest], ServingRecord],
) -> None:
    requests, record = run
    tables = build_tables(record, _SCENARIO)
    columns = ipc.table_to_record(tables["requests"], RequestColumns)
    assert isinstance(columns, RequestColumns)
    assert columns.num_decode_tokens.tolist() == [request.answer for request in requests]
    assert tables["steps"].num_rows == sum(len(steps.end_ns) for steps in record.steps)
    assert isinstance(ipc.table_to_record(tables["series"], SeriesColumns), SeriesColumns)


@pytest.mark.parametrize("name", ["requests", "steps", "series"])
def test_a_table_can_be_kept_as_parquet_and_as_text(name: str) -> None:
    table = build_tables(_record(), _SCENARIO)[name]
    file = io.BytesIO()
    parquet.write_table(table, file)
    assert parquet.read_table(file).num_rows == table.num_rows
    text = io.BytesIO()
    csv.write_csv(table, text)
    assert len(text.getvalue().splitlines()) == table.num_rows + 1


def test_a_table_survives_the_wire() -> None:
    table: pa.Table = build_tables(_record(), _SCENARIO)["requests"]
    arrived = ipc.read_chunks(ipc.write_chunks(table))
    assert ipc.table_to_record(arrived, RequestColumns) == ipc.table_to_record(
        table, RequestColumns
    )


def test_power_is_idle_where_nothing_runs() -> None:
    requests = [
        TinyRequest(arrival_ns=0, prompt=6, answer=1),
        TinyRequest(arrival_ns=2500 * MS, prompt=3, answer=1),
    ]
    record = run_tiny_engines(requests, TinyRules(step_ns=(500 * MS,)))
    power = build_tables(record, _SCENARIO)["series"].column("power_w").to_pylist()
    assert power == pytest.approx([400.0, 100.0, 399.4, 100.6])
