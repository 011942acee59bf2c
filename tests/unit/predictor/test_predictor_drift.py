"""New measurements against the active model."""

import logging
import threading
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from predictor_fakes import FakeCatalog, Rows, row_of

from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import ServiceUnavailableError
from foretoken.domain.measurements.estimate import (
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    Provenance,
)
from foretoken.domain.measurements.measurement import (
    ArrowStream,
    MeasurementBatch,
    MeasurementFilter,
    Run,
    RunKind,
    RunSummary,
)
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.drift import DriftEntry, DriftLimits, DriftWatch
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.upkeep import RepeatedWork
from foretoken.wire.arrow import STORED_SCHEMA, rows_to_table

_TRAINED = datetime(2026, 1, 1, tzinfo=UTC)
_ESTIMATE_US = 100.0


def _minutes(number: float) -> datetime:
    return _TRAINED + timedelta(minutes=number)


@dataclass
class RunsCatalog(FakeCatalog):
    """Runs with the moments at which their rows were recorded.

    `reads` are the runs that were read; `listed` is released at every listing.
    """

    runs: list[RunSummary] = field(default_factory=list)
    recorded: dict[str, list[tuple[datetime, dict[str, Any]]]] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)
    listed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_gone: bool = False

    def wait_for_listings(self, number: int) -> None:
        assert all(self.listed.acquire(timeout=60.0) for _ in range(number))

    def list_runs(self) -> tuple[RunSummary, ...]:
        self.listed.release()
        if self.is_gone:
            raise ServiceUnavailableError("no catalog here")
        return tuple(reversed(self.runs))

    def read_measurements(self, selection: MeasurementFilter) -> ArrowStream:
        self.reads.append(selection.run_id)
        rows = self.recorded[selection.run_id]
        table = rows_to_table([row for _, row in rows])
        columns = {
            "run_id": pa.array([selection.run_id] * len(rows), pa.string()),
            "batch_index": pa.array([0] * len(rows), pa.int64()),
            "row_index": pa.array(range(len(rows)), pa.int64()),
            "recorded_at": pa.array([t.replace(tzinfo=None) for t, _ in rows], pa.timestamp("us")),
            **{name: table[name] for name in table.schema.names},
        }
        return pa.table(columns, schema=STORED_SCHEMA)

    def add(
        self, run_id: str, rows: Rows, at: datetime, *, kind: RunKind = RunKind.PROFILE
    ) -> None:
        """Record rows of a new run, or more of one there is; an import is complete with them."""
        known = {run.run.run_id: run for run in self.runs}
        summary = known.get(run_id) or RunSummary(
            run=Run(run_id=run_id, kind=kind, tool="test"), started_at=_stamp(at)
        )
        self.recorded.setdefault(run_id, []).extend((at, row) for row in rows)
        summary = replace(summary, num_rows=summary.num_rows + len(rows))
        if kind is RunKind.IMPORT:
            summary = replace(summary, completed_at=_stamp(at))
        self.runs = [run for run in self.runs if run.run.run_id != run_id] + [summary]


@dataclass
class FixedModel:
    """Estimates 100 µs for everything, with 90 to 110 µs around it."""

    version: str = "v1"
    created_at: str = _TRAINED.isoformat()
    queries: list[LatencyQuery] = field(default_factory=list)

    def active(self) -> ModelSet:
        return ModelSet(version=self.version, created_at=self.created_at)

    def predict(self, query: LatencyQuery) -> LatencyReply:
        self.queries.append(query)
        latency_us = np.full(query.tables[0].num_rows, _ESTIMATE_US)
        answer = LatencyColumns(
            latency_us=latency_us,
            low_us=0.9 * latency_us,
            high_us=1.1 * latency_us,
            provenance=np.full(len(latency_us), Provenance.INTERPOLATED.value),
        )
        return LatencyReply(model_version=self.version, tables=(answer,))


@dataclass
class _Moments:
    """A clock that is set by hand."""

    now: datetime = _TRAINED

    def __call__(self) -> datetime:
        return self.now


def _stamp(moment: datetime) -> str:
    return moment.replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def _gemms(*latencies_us: float, **other: Any) -> Rows:
    return [
        row_of("gemm", {"m": 16 * (i + 1), "n": 4096, "k": 4096}, latency_us) | other
        for i, latency_us in enumerate(latencies_us)
    ]


def _watch(
    catalog: RunsCatalog, model: FixedModel, limits: DriftLimits | None = None
) -> DriftWatch:
    return DriftWatch(catalog, model.predict, model.active, limits)


def test_the_report_says_how_far_how_biased_and_how_often_inside() -> None:
    catalog = RunsCatalog()
    catalog.add("new", _gemms(95.0, 105.0, 120.0, 140.0), _minutes(1))
    (entry,) = _watch(catalog, FixedModel()).check().entries
    assert ("gemm", "a30", 4) == (entry.operator, entry.device, entry.num_rows)
    found = (entry.error_ratio_median, entry.error_ratio_p90)
    assert pytest.approx((0.125, 0.34)) == found
    assert pytest.approx((0.125, 0.5)) == (entry.bias_ratio_median, entry.inside_ratio)


def test_what_the_model_was_trained_on_does_not_count() -> None:
    catalog = RunsCatalog()
    catalog.add("imported", _gemms(500.0), _minutes(-2), kind=RunKind.IMPORT)
    catalog.add("profile", _gemms(500.0), _minutes(-1))
    catalog.add("profile", _gemms(110.0), _minutes(1))
    (entry,) = _watch(catalog, FixedModel()).check().entries
    assert pytest.approx((1, 0.1)) == (entry.num_rows, entry.bias_ratio_median)


def test_an_import_counts_as_a_whole_once_it_is_complete() -> None:
    """Its rows were recorded before the training, which could not see them."""
    catalog = RunsCatalog()
    catalog.add("imported", _gemms(120.0), _minutes(-1), kind=RunKind.IMPORT)
    open_run = replace(catalog.runs[0], completed_at="")
    catalog.runs = [open_run]
    model = FixedModel()
    watch = _watch(catalog, model)
    assert () == watch.check().entries
    catalog.runs = [replace(open_run, completed_at=_stamp(_minutes(1)))]
    (entry,) = watch.check().entries
    assert 1 == entry.num_rows


def test_a_real_catalog_says_when_rows_came(tmp_path: Path) -> None:
    """Rows of a profile count from when they were recorded, those of an import from its end."""
    moments = _Moments()
    catalog = CatalogService(CatalogConfig(path=str(tmp_path / "catalog.duckdb")), moments)
    catalog.open()
    profile = Run(run_id="profile", kind=RunKind.PROFILE, tool="test")
    imported = Run(run_id="imported", kind=RunKind.IMPORT, tool="test")

    def record(run: Run, index: int, rows: Rows, *, is_last: bool = False) -> None:
        batch = MeasurementBatch(batch_index=index, rows=rows_to_table(rows), is_last=is_last)
        list(catalog.record(run, [batch]))

    moments.now = _minutes(-1)
    record(profile, 0, _gemms(500.0, 500.0))
    record(imported, 0, _gemms(110.0, dtype="bf16"))
    watch = DriftWatch(catalog, FixedModel().predict, FixedModel().active)
    assert () == watch.check().entries
    moments.now = _minutes(1)
    record(profile, 1, _gemms(120.0, phase="backward"))
    record(imported, 1, _gemms(130.0, 140.0, device="a40"), is_last=True)
    found = {entry.device: entry for entry in watch.check().entries}
    assert {"a30": 2, "a40": 2} == {device: entry.num_rows for device, entry in found.items()}
    assert pytest.approx(0.15) == found["a30"].bias_ratio_median
    catalog.close()


def test_what_disagrees_with_earlier_runs_is_compared_though_it_is_flagged(
    tmp_path: Path,
) -> None:
    """A point that takes another time now is the very sign of drift."""
    moments = _Moments(_minutes(-1))
    catalog = CatalogService(CatalogConfig(path=str(tmp_path / "catalog.duckdb")), moments)
    catalog.open()
    for run_id, latency_us in (("first", 100.0), ("second", 102.0), ("third", 150.0)):
        batch = MeasurementBatch(
            batch_index=0, rows=rows_to_table(_gemms(latency_us)), is_last=True
        )
        list(catalog.record(Run(run_id=run_id, kind=RunKind.PROFILE, tool="test"), [batch]))
        moments.now = _minutes(1)
    report = DriftWatch(catalog, FixedModel().predict, FixedModel().active).check()
    assert (2, 1) == (report.entries[0].num_rows, report.num_flagged)
    catalog.close()


def test_a_run_is_read_again_only_when_it_has_grown() -> None:
    catalog = RunsCatalog()
    catalog.add("new", _gemms(100.0), _minutes(1))
    watch = _watch(catalog, FixedModel())
    watch.check()
    watch.check()
    assert ["new"] == catalog.reads
    catalog.add("new", _gemms(130.0, 130.0), _minutes(2))
    (entry,) = watch.check().entries
    assert (["new", "new"], 3) == (catalog.reads, entry.num_rows)


def test_each_circumstance_is_asked_for_as_it_was_measured() -> None:
    catalog = RunsCatalog()
    stack = {"framework": "vllm", "framework_version": "0.19", "kernel": "flashinfer"}
    rows = [
        *_gemms(100.0, 100.0),
        *_gemms(100.0, variant="quant=fp8", **stack),
        *_gemms(100.0, device="h100_sxm"),
        *_gemms(100.0, phase="backward", dtype="bf16"),
    ]
    catalog.add("new", rows, _minutes(1))
    model = FixedModel()
    entries = _watch(catalog, model).check().entries
    asked = {
        (q.device, q.framework, t.variant, t.kernel, t.dtype.name, t.phase.name, t.num_rows)
        for q in model.queries
        for t in q.tables
    }
    assert {
        ("a30", "", "", "", "FP16", "FORWARD", 2),
        ("a30", "vllm 0.19", "quant=fp8", "flashinfer", "FP16", "FORWARD", 1),
        ("h100_sxm", "", "", "", "FP16", "FORWARD", 1),
        ("a30", "", "", "", "BF16", "BACKWARD", 1),
    } == asked
    assert not any(query.prefer_measured for query in model.queries)
    assert [("a30", 4), ("h100_sxm", 1)] == [(e.device, e.num_rows) for e in entries]


def test_the_topology_is_asked_for_with_collectives_alone() -> None:
    catalog = RunsCatalog()
    dims = dict.fromkeys(find_operator("all_reduce").dim_names, 2)
    place = {"device": "a100_sxm_80", "topology": "a100_dgx"}
    rows = [row_of("all_reduce", dims, 100.0, **place), *_gemms(100.0, **place)]
    catalog.add("new", rows, _minutes(1))
    model = FixedModel()
    _watch(catalog, model).check()
    asked = {query.tables[0].operator: query.topology for query in model.queries}
    assert {"all_reduce": "a100_dgx", "gemm": ""} == asked


def test_rows_nobody_could_train_on_are_passed_over() -> None:
    catalog = RunsCatalog()
    rows = [
        *_gemms(100.0),
        *_gemms(0.0),
        *_gemms(100.0, flags=["slow: much"]),
        *_gemms(100.0, operator="no_such_operator"),
        *_gemms(100.0, dtype="no_such_format"),
        *_gemms(100.0, dtype="bf16", dims={"m": 1}),
    ]
    catalog.add("new", rows, _minutes(1))
    (entry,) = _watch(catalog, FixedModel()).check().entries
    assert 1 == entry.num_rows


def test_a_check_reads_the_newest_runs_that_fit_and_says_what_it_left() -> None:
    catalog = RunsCatalog()
    for number in range(3):
        catalog.add(f"run-{number}", _gemms(*[100.0] * 4), _minutes(number + 1))
    watch = _watch(catalog, FixedModel(), DriftLimits(max_rows_per_check=9))
    assert 4 == watch.check().num_left_out
    assert ["run-2", "run-1"] == catalog.reads
    assert 0 == watch.check().num_left_out
    assert ["run-2", "run-1", "run-0"] == catalog.reads


def test_a_run_larger_than_a_check_is_represented_by_rows_from_all_of_it() -> None:
    catalog = RunsCatalog()
    catalog.add("large", _gemms(*range(100, 125)), _minutes(1))
    report = _watch(catalog, FixedModel(), DriftLimits(max_rows_per_check=10)).check()
    (entry,) = report.entries
    assert (9, 16) == (entry.num_rows, report.num_left_out)
    assert pytest.approx(0.12) == entry.bias_ratio_median


def test_old_runs_make_room_for_new_ones() -> None:
    catalog = RunsCatalog()
    catalog.add("old", _gemms(*[200.0] * 4), _minutes(1))
    watch = _watch(catalog, FixedModel(), DriftLimits(max_rows=5))
    watch.check()
    catalog.add("new", _gemms(*[110.0] * 4), _minutes(2))
    report = watch.check()
    assert (4, 4) == (report.entries[0].num_rows, report.num_left_out)
    assert pytest.approx(0.1) == report.entries[0].bias_ratio_median


def test_another_model_starts_anew() -> None:
    catalog = RunsCatalog()
    catalog.add("new", _gemms(150.0), _minutes(1))
    model = FixedModel()
    watch = _watch(catalog, model)
    watch.check()
    model.version = "v2"
    report = watch.check()
    assert ("v2", ["new", "new"]) == (report.model_version, catalog.reads)
    assert 1 == report.entries[0].num_rows


def test_without_a_model_there_is_nothing_to_compare() -> None:
    catalog = RunsCatalog()
    catalog.add("new", _gemms(150.0), _minutes(1))
    report = _watch(catalog, FixedModel(version="")).check()
    assert ("", (), []) == (report.model_version, report.entries, catalog.reads)


def test_a_copy_of_which_the_moment_is_unknown_is_compared_once_it_is_known() -> None:
    """A predictor that started without its catalog has such a copy."""
    catalog = RunsCatalog()
    catalog.add("new", _gemms(150.0), _minutes(1))
    model = FixedModel(created_at="")
    watch = _watch(catalog, model)
    assert () == watch.check().entries
    model.created_at = _TRAINED.isoformat()
    assert 1 == watch.check().entries[0].num_rows


def test_a_model_that_changes_during_a_check_leaves_it_to_the_next() -> None:
    catalog = RunsCatalog()
    catalog.add("new", _gemms(150.0), _minutes(1))
    answering = FixedModel(version="v2")
    watch = DriftWatch(catalog, answering.predict, FixedModel().active)
    assert () == watch.check().entries


def test_what_has_no_estimate_is_left_out() -> None:
    catalog = RunsCatalog()
    catalog.add("new", _gemms(150.0), _minutes(1))

    def refuse(_query: LatencyQuery) -> LatencyReply:
        raise ServiceUnavailableError("no estimate")

    report = DriftWatch(catalog, refuse, FixedModel().active).check()
    assert ((), 1) == (report.entries, report.num_left_out)


def test_a_catalog_that_goes_away_costs_one_warning_and_no_statistics(
    caplog: pytest.LogCaptureFixture,
) -> None:
    catalog = RunsCatalog()
    catalog.add("new", _gemms(150.0), _minutes(1))
    watch = _watch(catalog, FixedModel())
    watch.check()
    catalog.is_gone = True
    thread = RepeatedWork("drift", watch.check, 0.001)
    with caplog.at_level(logging.WARNING):
        thread.start()
        catalog.wait_for_listings(4)
        thread.stop()
    assert 1 == sum("no catalog here" in record.message for record in caplog.records)
    assert 1 == len(watch.report.entries)


def test_a_thread_outlives_what_nobody_expected(caplog: pytest.LogCaptureFixture) -> None:
    is_done = threading.Event()
    failures = [KeyError("a bug")]

    def work(_is_stopped: object) -> None:
        if failures:
            raise failures.pop()
        is_done.set()

    thread = RepeatedWork("work", work, 0.001)
    thread.start()
    assert is_done.wait(60.0)
    thread.stop()
    assert ["work failed unexpectedly, will be tried again"] == caplog.messages


def test_the_thread_finds_what_is_new_and_stops_while_it_waits() -> None:
    catalog = RunsCatalog()
    catalog.add("new", _gemms(150.0), _minutes(1))
    watch = _watch(catalog, FixedModel())
    quick = RepeatedWork("drift", watch.check, 0.001)
    slow = RepeatedWork("drift", watch.check, 3600.0)
    for thread in (quick, slow):
        thread.start()
    catalog.wait_for_listings(2)
    for thread in (quick, slow):
        thread.stop()
    assert [False, False] == [thread._thread.is_alive() for thread in (quick, slow)]
    assert [1] == [entry.num_rows for entry in watch.report.entries]


def test_a_check_that_is_stopped_keeps_what_was_known() -> None:
    catalog = RunsCatalog()
    catalog.add("old", _gemms(110.0), _minutes(1))
    watch = _watch(catalog, FixedModel())
    before: tuple[DriftEntry, ...] = watch.check().entries
    catalog.add("new", _gemms(150.0), _minutes(2))
    assert before == watch.check(lambda: True).entries
    assert 2 == watch.check().entries[0].num_rows
