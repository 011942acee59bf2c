"""A run over a plan: failures are rows, and it stops when it has to."""

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from profiler_fakes import CPU, FAST, HASTY, FakeCatalog, spooled_rows

from foretoken.domain.errors import CancelledJobError, ServiceUnavailableError
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.measurements.measurement import Run, RunKind
from foretoken.domain.units import describe_seconds
from foretoken.jobs.runner import JobProgress
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.planning.durations import CaseDurations
from foretoken.profiler.planning.plan import ProfilePlan
from foretoken.profiler.recording.batches import RowBuilder, open_writer
from foretoken.profiler.recording.spool import Row
from foretoken.profiler.report import ReportBuilder
from foretoken.profiler.session import ProfileSession, SessionSpec
from foretoken.profiler.timing.case import HungCaseWatch, Rig
from foretoken.profiler.timing.stopwatch import CpuStopwatch

RIG = Rig(
    device=LocalDevice(name="cpu", torch_name="cpu"),
    device_spec=CPU,
    stopwatch=CpuStopwatch(),
    timer=FAST,
    num_threads=1,
)
ROWS = RowBuilder("cpu", "torch", "9.9")
RAGGED = OperatorCall(
    operator="gemm", dtype=DType.FP32, dims={"m": 1, "n": 1, "k": 1}, kernel="no such kernel"
)


def gemm(m: int) -> OperatorCall:
    return OperatorCall(operator="gemm", dtype=DType.FP32, dims={"m": m, "n": 16, "k": 16})


class Drift:
    """Is due at every other call, and off the first time."""

    def __init__(self) -> None:
        self._num_asked = 0
        self.answers = [["drift: 9 %"], [], [], []]

    def is_due(self, _now_s: float) -> bool:
        self._num_asked += 1
        return self._num_asked % 2 == 0

    def check(self, _now_s: float) -> list[str]:
        return self.answers.pop(0)


class Harness:
    """A session on the CPU into a catalog in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.catalog = FakeCatalog()
        self.messages: list[str] = []
        self.ratios: list[float] = []
        self.cancelled = threading.Event()
        self.on_report: Callable[[], None] = lambda: None
        self.hand_over = HASTY
        self.spec = SessionSpec(rig=RIG, seed=0)
        self.report = ReportBuilder()
        self.num_left = 0

    def run(self, *calls: OperatorCall, collectives: Sequence[OperatorCall] = ()) -> None:
        run = Run(run_id="r1", kind=RunKind.PROFILE, tool="test")
        durations = CaseDurations(CPU, FAST)
        with open_writer(self.catalog, run, self.folder, self.hand_over) as writer:
            session = ProfileSession(self.spec, ROWS, writer, durations, self.report)
            try:
                session.run(
                    ProfilePlan(calls=calls, collectives=tuple(collectives)),
                    JobProgress(self._progress, self.cancelled),
                )
            finally:
                self.num_left = session.num_left

    def _progress(self, ratio: float, message: str) -> None:
        self.ratios.append(ratio)
        self.messages.append(message)
        self.on_report()

    def statuses(self) -> list[str]:
        found: list[str] = self.catalog.table.column("status").to_pylist()
        return found


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def test_case_that_cannot_run_is_a_row_and_the_rest_goes_on(harness: Harness) -> None:
    harness.run(gemm(1), RAGGED, gemm(2))
    assert harness.statuses() == ["ok", "failed", "ok"]
    table = harness.catalog.table
    assert "no such kernel" in table.column("status_reason").to_pylist()[1]
    assert table.column("kernel").to_pylist()[1] == "no such kernel"
    report = harness.report.build()
    assert (report.num_measured, report.num_failed, harness.num_left) == (2, 1, 0)
    assert harness.catalog.completed == {"r1"}


def test_case_too_large_for_the_memory_is_a_row_with_that_reason(harness: Harness) -> None:
    harness.run(OperatorCall(operator="adam", dtype=DType.FP32, dims={"num_params": 2**44}))
    assert harness.statuses() == ["failed"]
    (reason,) = harness.catalog.table.column("status_reason").to_pylist()
    assert reason.startswith("DeviceMemoryError: needs about")


def test_cancelled_run_keeps_what_it_measured_and_is_over(harness: Harness) -> None:
    def cancel_at_the_third() -> None:
        if len(harness.messages) == 2:
            harness.cancelled.set()

    harness.on_report = cancel_at_the_third
    with pytest.raises(CancelledJobError):
        harness.run(*(gemm(m) for m in range(1, 9)))
    assert harness.statuses() == ["ok", "ok"]
    assert harness.catalog.completed == {"r1"}
    assert list(harness.folder.iterdir()) == []


def test_catalog_that_is_away_at_the_end_leaves_the_rows_on_disk(harness: Harness) -> None:
    harness.catalog.errors = [ServiceUnavailableError("gone")] * 100_000
    harness.hand_over = replace(HASTY, batch_rows=1, receipt_s=0.01, catalog_s=0.05)
    with pytest.raises(ServiceUnavailableError, match="3 rows are kept"):
        harness.run(gemm(1), gemm(2), gemm(3))
    assert spooled_rows(harness.folder) == 3
    assert "2 rows wait for the catalog" in harness.messages[2]


def test_time_cap_leaves_the_rest(harness: Harness) -> None:
    harness.spec = replace(harness.spec, time_cap_s=1e-9)
    harness.run(gemm(1), gemm(2))
    assert harness.num_left == 2
    assert harness.catalog.completed == {"r1"}


def test_progress_names_the_operator_and_what_failed(harness: Harness) -> None:
    """How long it takes yet is said by who watches, from the ratio."""
    harness.run(gemm(1), RAGGED, gemm(2))
    assert "gemm 1/3" == harness.messages[0]
    assert "gemm 3/3, 1 failed" == harness.messages[2]
    assert all(0.0 <= ratio <= 1.0 for ratio in harness.ratios)


def test_rows_timed_while_the_reference_was_off_are_doubted(harness: Harness) -> None:
    harness.spec = replace(harness.spec, drift=Drift())
    harness.run(gemm(1), gemm(2), gemm(3))
    assert harness.catalog.table.column("flags").to_pylist() == [
        ["drift: 9 %"],
        ["drift: 9 %"],
        [],
    ]
    assert harness.report.build().num_flagged == 2


def test_disturbed_cases_are_timed_again_at_the_end(harness: Harness) -> None:
    """Their flagged rows stay; a case that fails, or that physics flags, is not tried again."""
    harness.spec = replace(harness.spec, drift=Drift(), retime_ratio=1e3)
    harness.run(gemm(1), RAGGED, gemm(2), gemm(3))
    table = harness.catalog.table
    sizes = [dict(dims).get("m") for dims in table.column("dims").to_pylist()]
    assert sizes == [1, RAGGED.dims.get("m"), 2, 3, 1]
    assert [bool(flags) for flags in table.column("flags").to_pylist()] == [True, *[False] * 4]
    report = harness.report.build()
    assert (report.num_measured, report.num_failed, report.num_flagged) == (3, 1, 0)
    assert "1 disturbed calls timed again" in harness.messages[-1]


def test_disturbed_cases_have_a_share_of_the_time(harness: Harness) -> None:
    harness.spec = replace(harness.spec, drift=Drift(), retime_ratio=0.0)
    harness.run(gemm(1), gemm(2))
    assert len(harness.statuses()) == 2


def test_a_case_that_stays_disturbed_is_not_tried_for_ever(harness: Harness) -> None:
    drift = Drift()
    drift.answers = [["drift: 9 %"]] * 9
    harness.spec = replace(harness.spec, drift=drift, retime_ratio=1e6)
    harness.run(gemm(1))
    assert len(harness.statuses()) == 3
    assert harness.report.build().num_flagged == 1


def test_collectives_are_rows_too_and_other_nodes_are_let_go(harness: Harness) -> None:
    was_let_go = False

    def time_all(calls: Sequence[OperatorCall]) -> Generator[Row]:
        nonlocal was_let_go
        for call in calls:
            yield ROWS.failed(call, "gloo", "a rank died")
        was_let_go = True

    harness.spec = replace(harness.spec, time_collectives=time_all)
    reduce = OperatorCall(
        operator="all_reduce",
        dtype=DType.BF16,
        dims={"message_bytes": 8, "devices_per_node": 2, "num_nodes": 1},
    )
    harness.run(gemm(1), collectives=(reduce, reduce))
    assert harness.statuses() == ["ok", "failed", "failed"]
    assert was_let_go


def test_case_that_never_ends_is_noted_and_ends_the_process() -> None:
    seen: list[str] = []
    has_left = threading.Event()
    watch = HungCaseWatch(
        0.01, lambda call, why: seen.append(f"{call.operator} {why}"), has_left.set
    )
    with watch.watch(gemm(1)):
        assert has_left.wait(60.0)
    assert seen == ["gemm HungCaseError: did not end in 0.01 s"]


def test_case_that_ends_in_time_is_left_alone() -> None:
    """What would end it ends itself, long before the limit."""
    has_left, others = threading.Event(), set(threading.enumerate())
    watch = HungCaseWatch(60.0, lambda *_: None, has_left.set)
    with watch.watch(gemm(1)):
        (ending,) = set(threading.enumerate()) - others
    ending.join()
    assert not has_left.is_set()


def test_times_are_told_as_people_say_them() -> None:
    said = [describe_seconds(s) for s in (0.4, 59.6, 300.0, 9000.0)]
    assert said == ["0 s", "60 s", "5 min", "2.5 h"]
