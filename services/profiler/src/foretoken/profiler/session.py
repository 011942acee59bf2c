"""One profiling run: time every call of a plan and record what comes out."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch

from foretoken.domain.errors import (
    CancelledJobError,
    ForetokenError,
    ServiceUnavailableError,
)
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.operators.spec.overlap import is_group_call
from foretoken.jobs.runner import JobProgress
from foretoken.profiler.kernel import TORCH_DTYPES, TensorFactory
from foretoken.profiler.planning.durations import CaseDurations, RemainingTime
from foretoken.profiler.planning.plan import ProfilePlan
from foretoken.profiler.recording.batches import BatchWriter, RowBuilder, reading_columns
from foretoken.profiler.recording.spool import Row
from foretoken.profiler.report import ReportBuilder
from foretoken.profiler.timing.case import HungCaseWatch, Rig, time_call

_log = logging.getLogger(__name__)

# Flags of what disturbed a timing from outside, and another time may not.
_PASSING_FLAGS = ("busy_machine", "drift", "shared_device", "throttled")
# How often a call is timed until nothing disturbs it.
_MOST_ATTEMPTS = 3
# A short run may take so long for that.
_RETIME_S_MIN = 5.0

# Where nobody watches, the log says now and then how far it is.
_LOG_PERIOD_S = 30.0


class DriftCheck(Protocol):
    """Times a reference between calls, and flags what was timed while it was off."""

    def is_due(self, now_s: float) -> bool:
        """Whether the reference should be timed again."""

    def check(self, now_s: float) -> list[str]:
        """Return the flags of all that was timed since the last check."""


TimeCollectives = Callable[[Sequence[OperatorCall]], Generator[Row]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSpec:
    """What one run measures with.

    `drift` is asked between calls (None: all rows are good as they come). `time_collectives` yields
    the rows of collectives in the order of the plan. A case that takes `case_s_hung` ends the
    process (0: none does). Calls that something disturbed are timed again at the end, for at most
    `retime_ratio` of the time that the run has taken.
    """

    rig: Rig
    seed: int
    time_cap_s: float = 0.0
    case_s_hung: float = 0.0
    retime_ratio: float = 0.0
    drift: DriftCheck | None = None
    time_collectives: TimeCollectives | None = None


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A call, and how often it has been timed with this time."""

    call: OperatorCall
    number: int = 1


@dataclass(slots=True)
class _Tensors:
    """One factory per dtype, so that each draws its values once."""

    device: torch.device
    seed: int
    _factories: dict[DType, TensorFactory] = field(default_factory=dict)

    def of(self, dtype: DType) -> TensorFactory:
        if dtype not in self._factories:
            self._factories[dtype] = TensorFactory(self.device, TORCH_DTYPES[dtype], self.seed)
        return self._factories[dtype]


class ProfileSession:
    """Times the calls of a plan in order, between which it can be cancelled."""

    def __init__(
        self,
        spec: SessionSpec,
        rows: RowBuilder,
        writer: BatchWriter,
        durations: CaseDurations,
        report: ReportBuilder,
    ) -> None:
        """Record with `writer`, count in `report`, and let `durations` learn."""
        self._spec = spec
        self._rows, self._writer = rows, writer
        self._durations, self._report = durations, report
        self._hung = HungCaseWatch(spec.case_s_hung, self._note_hung)
        self._tensors = _Tensors(spec.rig.device.torch_device, spec.seed)
        self._unchecked: list[tuple[_Attempt, Row]] = []
        self._disturbed: deque[_Attempt] = deque()
        self._start_s = 0.0
        self._logged_s = 0.0
        self.num_left = 0

    def run(self, plan: ProfilePlan, progress: JobProgress) -> None:
        """Time all calls, or as many as the time cap allows.

        Raises:
            CancelledJobError: cancelled; what was measured until then is kept.
            ForetokenError: the catalog refused a batch or stayed away to the end, or the device
                stopped working; what was measured until then is kept.

        """
        self._start_s = self._logged_s = self._now_s()
        try:
            self._time_all(plan, progress)
        except CancelledJobError:
            self._check_drift()
            # Whoever cancels does not want to wait; what the catalog has not is kept.
            with suppress(CancelledJobError, ServiceUnavailableError):
                self._writer.finish(lambda _: None, is_hasty=True)
            raise
        self._check_drift()
        self._writer.finish(lambda message: progress.update(1.0, message))

    def _time_all(self, plan: ProfilePlan, progress: JobProgress) -> None:
        calls = plan.all_calls
        remaining = RemainingTime(self._durations, calls)
        # Closing it stops the processes of a collective, whatever ends this loop.
        with closing(self._time_each(plan)) as rows:
            for done, call in enumerate(calls):
                start_s = self._now_s()
                if self._is_time_up():
                    self.num_left = len(calls) - done
                    return
                progress.update(self._ratio(remaining), self._message(call, done, len(calls)))
                row, interval_ratio = next(rows)
                taken_s = self._now_s() - start_s
                remaining.take(call, taken_s)
                self._report.add(call, row, taken_s, interval_ratio)
                self._take(_Attempt(call), row)
                self._log_progress(done + 1, len(calls), remaining)
            # Other nodes wait to be let go.
            next(rows, None)
        self._time_disturbed(progress)

    def _time_disturbed(self, progress: JobProgress) -> None:
        """Time again what something disturbed, while there is time; flagged rows stay, too."""
        self._check_drift()
        start_s = self._now_s()
        ratio = self._spec.retime_ratio
        allowed_s = max(ratio * (start_s - self._start_s), _RETIME_S_MIN) if ratio else 0.0
        while self._disturbed and not self._is_time_up():
            now_s = self._now_s()
            if now_s - start_s >= allowed_s:
                _log.info("disturbed=%d have no time to be timed again", len(self._disturbed))
                return
            attempt = self._disturbed.popleft()
            progress.update(0.99, f"{len(self._disturbed) + 1:,} disturbed calls timed again")
            row, _ = self._time_call(attempt.call)
            self._report.replace(attempt.call.operator, row, self._now_s() - now_s)
            self._take(_Attempt(attempt.call, attempt.number + 1), row)
            if not self._disturbed:
                self._check_drift()

    def _time_each(self, plan: ProfilePlan) -> Generator[tuple[Row, float | None]]:
        for call in plan.calls:
            yield self._time_call(call)
        if self._spec.time_collectives is not None:
            with closing(self._spec.time_collectives(plan.collectives)) as rows:
                for row in rows:
                    yield row, None

    def _now_s(self) -> float:
        return self._spec.rig.stopwatch.now_s()

    def _is_time_up(self) -> bool:
        cap_s = self._spec.time_cap_s
        return 0.0 < cap_s <= self._now_s() - self._start_s

    def _ratio(self, remaining: RemainingTime) -> float:
        elapsed_s = self._now_s() - self._start_s
        return elapsed_s / max(elapsed_s + remaining.seconds, 1e-9)

    def _message(self, call: OperatorCall, done: int, num_calls: int) -> str:
        parts = [f"{call.operator} {done + 1:,}/{num_calls:,}"]
        if self._report.num_failed:
            parts.append(f"{self._report.num_failed:,} failed")
        if self._writer.num_waiting_rows:
            parts.append(f"{self._writer.num_waiting_rows:,} rows wait for the catalog")
        return ", ".join(parts)

    def _log_progress(self, done: int, num_calls: int, remaining: RemainingTime) -> None:
        if done < num_calls and self._now_s() - self._logged_s < _LOG_PERIOD_S:
            return
        self._logged_s = self._now_s()
        _log.info(
            "device=%s done=%d calls=%d failed=%d waiting_rows=%d left_s=%.0f",
            self._spec.rig.device.name,
            done,
            num_calls,
            self._report.num_failed,
            self._writer.num_waiting_rows,
            remaining.seconds,
        )

    def _take(self, attempt: _Attempt, row: Row) -> None:
        now_s = self._now_s()
        self._writer.add(row, now_s)
        self._unchecked.append((attempt, row))
        drift = self._spec.drift
        if drift is None or drift.is_due(now_s):
            self._check_drift()

    def _check_drift(self) -> None:
        """Let go of the rows since the last check, flagged if the reference was off."""
        drift, now_s = self._spec.drift, self._now_s()
        drift_flags = drift.check(now_s) if drift is not None and self._unchecked else []
        for attempt, row in self._unchecked:
            if row["status"] != "ok":
                continue
            if drift_flags and not row["flags"]:
                self._report.doubt(attempt.call.operator)
            flags = [*row["flags"], *drift_flags]
            is_disturbed = bool(flags) and all(flag.startswith(_PASSING_FLAGS) for flag in flags)
            is_alone = not is_group_call(attempt.call)
            if is_disturbed and is_alone and attempt.number < _MOST_ATTEMPTS:
                self._disturbed.append(attempt)
        self._unchecked.clear()
        self._writer.confirm(self._now_s(), drift_flags)

    def _time_call(self, call: OperatorCall) -> tuple[Row, float | None]:
        try:
            with self._hung.watch(call):
                timing = time_call(call, self._tensors.of(call.dtype), self._spec.rig)
        except Exception as err:  # noqa: BLE001
            # Kernels of libraries raise whatever they like; the next case may run.
            reason = _reason_of(err)
        else:
            row = self._rows.measured(
                call,
                timing.kernel,
                timing.summary,
                flags=timing.flags,
                kernel_name=timing.kernel_name or None,
                **reading_columns(timing.reading),
            )
            return row, timing.summary.interval_ratio
        # Only here, where the error is gone, does nothing hold the tensors of the case any more.
        row = self._rows.failed(call, call.kernel, reason)
        self._recover(call, row, reason)
        return row, None

    def _note_hung(self, call: OperatorCall, reason: str) -> None:
        """Keep a failed row on disk, and send it if the catalog is there."""
        self._writer.add(self._rows.failed(call, call.kernel, reason), self._now_s())
        self._writer.flush()

    def _recover(self, call: OperatorCall, row: Row, reason: str) -> None:
        """Free what a failed case held; a device that does not answer any more ends the run."""
        device = self._spec.rig.device
        if not device.is_cuda:
            return
        try:
            torch.cuda.synchronize(device.torch_device)
            torch.cuda.empty_cache()
        except RuntimeError as dead:
            # The row is recorded, so that whoever starts again does not run into it again.
            self._take(_Attempt(call), row)
            self._writer.flush()
            raise ForetokenError(
                f"the device stopped working after {call.operator} {dict(call.dims)}: {reason};"
                " start the same profile again to go on behind it"
            ) from dead


def _reason_of(err: Exception) -> str:
    lines = str(err).strip().splitlines() or [""]
    return f"{type(err).__name__}: {lines[0]}"
