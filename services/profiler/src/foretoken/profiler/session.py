"""One profiling run: time every call of a plan and record what comes out."""

import dataclasses
import itertools
import logging
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field

import torch

from foretoken.domain.errors import (
    CancelledJobError,
    DeviceMemoryError,
    ForetokenError,
    InvalidRequestError,
)
from foretoken.domain.estimate import DType, OperatorCall, Phase
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.job_runner import JobProgress
from foretoken.domain.operator import find_operator
from foretoken.profiler.batches import BatchWriter, Row, RowBuilder, reading_columns
from foretoken.profiler.collectives import (
    CollectiveGroup,
    CollectiveTimingError,
    GroupLostError,
    GroupSpec,
)
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.environment import free_memory_bytes, last_cache_bytes, read_device
from foretoken.profiler.kernel import TORCH_DTYPES, TensorFactory, all_kernels, prepare_case
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.plan import ProfilePlan
from foretoken.profiler.self_test import doubts, physical_limits
from foretoken.profiler.timer import Stopwatch, TimingSummary, time_case

_log = logging.getLogger(__name__)

# A backward call holds its inputs, their gradients and what the forward pass saved.
_BACKWARD_MEMORY_RATIO = 3.0
# Ranks wait for each other, so their times scatter more and need more samples.
_GROUP_PATIENCE_RATIO = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSpec:
    """What one run measures with: the device, the rules of timing, limits, names."""

    device: LocalDevice
    device_spec: DeviceSpec
    timer: TimerSpec
    seed: int
    num_threads: int
    memory_ratio_max: float
    time_cap_s: float = 0.0
    topology: str = ""


@dataclass(slots=True)
class SessionCounts:
    """What became of the calls of a plan."""

    num_measured: int = 0
    num_failed: int = 0
    num_left: int = 0


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
        self, spec: SessionSpec, stopwatch: Stopwatch, rows: RowBuilder, writer: BatchWriter
    ) -> None:
        """Time with `stopwatch`, record with `writer`."""
        self._spec = spec
        self._stopwatch = stopwatch
        self._rows = rows
        self._writer = writer
        self._tensors = _Tensors(spec.device.torch_device, spec.seed)
        self._start_s = 0.0
        self.counts = SessionCounts()

    def run(self, plan: ProfilePlan, progress: JobProgress) -> None:
        """Time all calls, or as many as the time cap allows.

        Raises:
            CancelledJobError: cancelled; what was measured until then is recorded.
            ForetokenError: the catalog refused a batch, or the device stopped working.

        """
        self._start_s = self._stopwatch.now_s()
        num_calls = len(plan.calls) + len(plan.collectives)
        calls = (*plan.calls, *_in_group_order(plan.collectives))
        # Closing it stops the processes of a collective, whatever ends this loop.
        with closing(self._time_collectives(plan.collectives)) as collective_rows:
            rows = itertools.chain(map(self._time_call, plan.calls), collective_rows)
            try:
                for done, call in enumerate(calls):
                    if self._is_time_up():
                        self.counts.num_left = num_calls - done
                        break
                    progress.update(done / num_calls, self._message(call, done, num_calls))
                    self._take(next(rows))
            except CancelledJobError:
                self._writer.flush()
                raise
        self._writer.flush(is_last=True)

    def _is_time_up(self) -> bool:
        cap_s = self._spec.time_cap_s
        return 0.0 < cap_s <= self._stopwatch.now_s() - self._start_s

    def _message(self, call: OperatorCall, done: int, num_calls: int) -> str:
        elapsed_s = self._stopwatch.now_s() - self._start_s
        left_s = elapsed_s / done * (num_calls - done) if done else 0.0
        eta = f", about {left_s:.0f} s left" if done else ""
        failed = f", {self.counts.num_failed} failed" if self.counts.num_failed else ""
        return f"{call.operator} {done + 1}/{num_calls}{failed}{eta}"

    def _take(self, row: Row) -> None:
        if row["status"] == "ok":
            self.counts.num_measured += 1
        else:
            self.counts.num_failed += 1
        self._writer.add(row, self._stopwatch.now_s())

    def _time_call(self, call: OperatorCall) -> Row:
        kernel = all_kernels()[call.operator]
        try:
            self._check_memory(call)
            case = prepare_case(
                kernel,
                call,
                self._tensors.of(call.dtype),
                self._spec.timer,
                last_cache_bytes(self._spec.device, self._spec.device_spec),
            )
            summary = time_case(case.call, self._stopwatch, self._spec.timer)
        except (RuntimeError, DeviceMemoryError, InvalidRequestError) as err:
            self._recover(err)
            return self._rows.failed(call, kernel.source, _reason_of(err))
        limits = physical_limits(self._spec.device_spec, call.dtype, self._spec.num_threads)
        return self._rows.measured(
            call,
            case.source,
            summary,
            flags=doubts(call, summary.latency_us_median, limits),
            **reading_columns(read_device(self._spec.device)),
        )

    def _check_memory(self, call: OperatorCall) -> None:
        spec, element_bytes = find_operator(call.operator), call.dtype.num_bytes
        needed = spec.moved_bytes(call.dims, element_bytes)
        needed += spec.num_weights(call.dims) * element_bytes
        if call.phase is Phase.BACKWARD:
            needed *= _BACKWARD_MEMORY_RATIO
        allowed = self._spec.memory_ratio_max * free_memory_bytes(self._spec.device)
        if needed > allowed:
            raise DeviceMemoryError(f"needs about {needed:.3g} bytes, {allowed:.3g} may be used")

    def _recover(self, err: Exception) -> None:
        """Free what a failed case holds; a device that does not answer any more ends the run."""
        if not self._spec.device.is_cuda:
            return
        try:
            torch.cuda.synchronize(self._spec.device.torch_device)
            torch.cuda.empty_cache()
        except RuntimeError as dead:
            self._writer.flush()
            raise ForetokenError(f"the device stopped working after: {_reason_of(err)}") from dead

    def _time_collectives(self, calls: tuple[OperatorCall, ...]) -> Generator[Row]:
        for num_ranks, members in _by_group(calls):
            group = CollectiveGroup(
                GroupSpec(
                    num_ranks=num_ranks,
                    is_cuda=self._spec.device.is_cuda,
                    seed=self._spec.seed,
                    timer=dataclasses.replace(
                        self._spec.timer,
                        case_s_max=self._spec.timer.case_s_max * _GROUP_PATIENCE_RATIO,
                    ),
                )
            )
            try:
                yield from self._time_group(group, members)
            finally:
                group.close()

    def _time_group(self, group: CollectiveGroup, calls: list[OperatorCall]) -> Iterator[Row]:
        backend = "nccl" if self._spec.device.is_cuda else "gloo"
        kernel, topology = f"torch.distributed({backend})", self._spec.topology
        lost = self._open_group(group)
        for call in calls:
            outcome = lost or _time_in_group(group, call)
            if isinstance(outcome, GroupLostError):
                lost = outcome
            if isinstance(outcome, CollectiveTimingError):
                yield self._rows.failed(call, kernel, str(outcome), topology=topology)
            else:
                yield self._rows.measured(call, kernel, outcome, topology=topology)

    def _open_group(self, group: CollectiveGroup) -> GroupLostError | None:
        try:
            group.open()
        except GroupLostError as err:
            _log.warning("device=%s: %s", self._spec.device.name, err)
            return err
        return None


def _time_in_group(
    group: CollectiveGroup, call: OperatorCall
) -> TimingSummary | CollectiveTimingError:
    try:
        return group.time(call)
    except CollectiveTimingError as err:
        return err


def _by_group(calls: tuple[OperatorCall, ...]) -> Iterator[tuple[int, list[OperatorCall]]]:
    for num_ranks in sorted({call.dims["devices_per_node"] for call in calls}):
        yield num_ranks, [call for call in calls if call.dims["devices_per_node"] == num_ranks]


def _in_group_order(calls: tuple[OperatorCall, ...]) -> Iterator[OperatorCall]:
    for _, members in _by_group(calls):
        yield from members


def _reason_of(err: Exception) -> str:
    lines = str(err).strip().splitlines() or [""]
    return f"{type(err).__name__}: {lines[0]}"
