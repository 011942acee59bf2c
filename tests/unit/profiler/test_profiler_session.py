"""A run over a plan: failures are rows, and it stops when told to."""

import threading

import pytest
from profiler_fakes import CPU, FakeCatalog

from foretoken.domain.errors import CancelledJobError, ImplausibleTimingError
from foretoken.domain.estimate import DType, OperatorCall
from foretoken.domain.job_runner import JobProgress
from foretoken.domain.measurement import Run, RunKind
from foretoken.profiler.batches import BatchWriter, RowBuilder
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.plan import ProfilePlan
from foretoken.profiler.self_test import SelfTest, check_self_test, doubts, physical_limits
from foretoken.profiler.session import ProfileSession, SessionSpec
from foretoken.profiler.timer import CpuStopwatch

FAST = TimerSpec(
    min_samples=3, warm_up_s_min=0.0, warm_up_s_max=0.001, case_s_max=0.005, max_input_sets=2
)


def gemm(m: int) -> OperatorCall:
    return OperatorCall(operator="gemm", dtype=DType.FP32, dims={"m": m, "n": 16, "k": 16})


class Harness:
    """A session on the CPU into a catalog in memory."""

    def __init__(self, time_cap_s: float = 0.0, batch_rows: int = 100) -> None:
        self.catalog = FakeCatalog()
        self.messages: list[str] = []
        self.cancelled = threading.Event()
        self.progress = JobProgress(
            lambda _, message: self.messages.append(message), self.cancelled
        )
        spec = SessionSpec(
            device=LocalDevice(name="cpu", torch_name="cpu"),
            device_spec=CPU,
            timer=FAST,
            seed=0,
            num_threads=1,
            memory_ratio_max=0.5,
            time_cap_s=time_cap_s,
        )
        run = Run(run_id="r1", kind=RunKind.PROFILE, tool="test")
        writer = BatchWriter(self.catalog, run, batch_rows=batch_rows, batch_s=100.0)
        rows = RowBuilder("cpu", "torch", "9.9")
        self.session = ProfileSession(spec, CpuStopwatch(), rows, writer)

    def statuses(self) -> list[str]:
        return self.catalog.table.column("status").to_pylist()


def test_case_that_cannot_run_is_a_row_and_the_rest_goes_on() -> None:
    harness = Harness()
    ragged = OperatorCall(
        operator="attention_decode",
        dtype=DType.FP32,
        dims={
            "num_seqs": 2,
            "kv_tokens": 7,
            "kv_tokens_max": 5,
            "num_heads": 2,
            "num_kv_heads": 2,
            "head_dim": 8,
        },
    )
    harness.session.run(ProfilePlan(calls=(gemm(1), ragged, gemm(2))), harness.progress)
    assert harness.statuses() == ["ok", "failed", "ok"]
    assert "ragged batch" in harness.catalog.table.column("status_reason").to_pylist()[1]
    counts = harness.session.counts
    assert (counts.num_measured, counts.num_failed, counts.num_left) == (2, 1, 0)
    assert harness.catalog.completed == {"r1"}


def test_case_too_large_for_the_memory_is_a_row_with_that_reason() -> None:
    harness = Harness()
    huge = OperatorCall(operator="adam", dtype=DType.FP32, dims={"num_params": 2**44})
    harness.session.run(ProfilePlan(calls=(huge,)), harness.progress)
    assert harness.statuses() == ["failed"]
    (reason,) = harness.catalog.table.column("status_reason").to_pylist()
    assert reason.startswith("DeviceMemoryError: needs about")


def test_cancelled_run_keeps_what_it_measured_and_stays_open() -> None:
    harness = Harness()
    seen = 0

    def report(_ratio: float, _message: str) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            harness.cancelled.set()

    progress = JobProgress(report, harness.cancelled)
    with pytest.raises(CancelledJobError):
        harness.session.run(ProfilePlan(calls=tuple(gemm(m) for m in range(1, 9))), progress)
    assert harness.statuses() == ["ok", "ok"]
    assert harness.catalog.completed == set()


def test_time_cap_leaves_the_rest() -> None:
    harness = Harness(time_cap_s=1e-9)
    harness.session.run(ProfilePlan(calls=(gemm(1), gemm(2))), harness.progress)
    assert harness.session.counts.num_left == 2
    assert harness.catalog.completed == {"r1"}


def test_progress_names_the_operator_and_what_is_left() -> None:
    harness = Harness()
    harness.session.run(ProfilePlan(calls=(gemm(1), gemm(2))), harness.progress)
    assert harness.messages[0] == "gemm 1/2"
    assert harness.messages[1].startswith("gemm 2/2, about ")


def test_self_test_refuses_what_physics_forbids() -> None:
    limits = physical_limits(CPU, DType.FP32, num_threads=1)
    good = SelfTest(copy_bytes_per_s=10e9, gemm_flops_per_s=100e9)
    check_self_test(good, limits)
    with pytest.raises(ImplausibleTimingError, match="GEMM"):
        check_self_test(SelfTest(copy_bytes_per_s=10e9, gemm_flops_per_s=1e15), limits)
    with pytest.raises(ImplausibleTimingError, match="copy"):
        check_self_test(SelfTest(copy_bytes_per_s=1e15, gemm_flops_per_s=1e9), limits)


def test_latency_above_the_peak_is_doubted() -> None:
    limits = physical_limits(CPU, DType.FP32, num_threads=1)
    call = OperatorCall(operator="gemm", dtype=DType.FP32, dims={"m": 1024, "n": 1024, "k": 1024})
    assert doubts(call, 1e6, limits) == []
    (flag,) = doubts(call, 1.0, limits)
    assert flag.startswith("above_peak: ")
