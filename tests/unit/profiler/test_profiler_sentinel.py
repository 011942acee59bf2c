"""Drift is noticed when the same work takes another time."""

import pytest
import torch
from profiler_fakes import CPU

from foretoken.profiler.config import TimerSpec
from foretoken.profiler.kernel import PreparedCase
from foretoken.profiler.local_device import find_local_device
from foretoken.profiler.timing.case import Rig
from foretoken.profiler.timing.sentinel import Sentinel, open_sentinel
from foretoken.profiler.timing.stopwatch import CpuStopwatch, IndexedCall


class SteppedStopwatch:
    """Every call takes `latency_us`, until somebody sets another."""

    def __init__(self) -> None:
        self.latency_us = 1000.0
        self.slow_calls = 0
        self._now_us = 0.0

    def time_calls_us(self, call: IndexedCall, first: int, num_calls: int) -> float:
        del call, first
        is_slow = self.slow_calls > 0
        self.slow_calls -= is_slow
        elapsed_us = num_calls * self.latency_us * (2.0 if is_slow else 1.0)
        self._now_us += elapsed_us
        return elapsed_us

    def now_s(self) -> float:
        return self._now_us * 1e-6


TIMER = TimerSpec(warm_up_s_min=0.0, warm_up_s_max=0.01, min_samples=6)


def sentinel(stopwatch: SteppedStopwatch, *, follows_run: bool = False) -> Sentinel:
    rig = Rig(
        device=find_local_device("cpu"),
        device_spec=CPU,
        stopwatch=stopwatch,
        timer=TIMER,
        num_threads=1,
    )
    case = PreparedCase(call=lambda _: None, input_bytes=1, num_input_sets=1, source="nothing")
    made = Sentinel(
        rig=rig,
        cases={"gemm": case},
        period_s=5.0,
        drift_ratios_max={"gemm": 0.02},
        follows_run=follows_run,
    )
    made.open()
    return made


@pytest.mark.parametrize("change", [1.0, 1.019, 0.985])
def test_small_changes_are_no_drift(change: float) -> None:
    stopwatch = SteppedStopwatch()
    watching = sentinel(stopwatch)
    stopwatch.latency_us *= change
    assert watching.check(1.0) == []


@pytest.mark.parametrize(("change", "shown"), [(1.05, "gemm +5.0%"), (0.9, "gemm -10.0%")])
def test_drift_either_way_is_a_flag(change: float, shown: str) -> None:
    stopwatch = SteppedStopwatch()
    watching = sentinel(stopwatch)
    stopwatch.latency_us *= change
    assert watching.check(1.0) == [f"drift: {shown} since the start of the run"]
    assert watching.summary()["sentinel_checks"] == "1"
    assert float(watching.summary()["sentinel_drift_max_gemm"]) == pytest.approx(change - 1.0)


def test_a_disturbed_look_is_repeated() -> None:
    """Only the first look meets something else on the machine; drift would show in both."""
    stopwatch = SteppedStopwatch()
    watching = sentinel(stopwatch)
    stopwatch.slow_calls = 20
    assert watching.check(1.0) == []
    assert len(watching.checks) == 1


def test_on_a_machine_that_is_never_quiet_the_usual_time_is_the_reference() -> None:
    """The first timings met something else; what comes later is right."""
    stopwatch = SteppedStopwatch()
    watching = sentinel(stopwatch, follows_run=True)
    stopwatch.latency_us *= 0.8
    found = [bool(watching.check(1.0)) for _ in range(4)]
    assert found == [True, False, False, False]
    stopwatch.latency_us *= 1.25
    assert watching.check(1.0) == ["drift: gemm +25.0% from the run's median"]


def test_the_next_look_is_due_a_period_after_the_last() -> None:
    stopwatch = SteppedStopwatch()
    watching = sentinel(stopwatch)
    opened_s = stopwatch.now_s()
    assert not watching.is_due(opened_s + 4.9)
    assert watching.is_due(opened_s + 5.0)
    watching.check(opened_s + 5.0)
    assert not watching.is_due(stopwatch.now_s() + 4.9)


def test_a_real_one_times_a_product_and_a_copy() -> None:
    rig = Rig(
        device=find_local_device("cpu"),
        device_spec=CPU,
        stopwatch=CpuStopwatch(),
        timer=TimerSpec(warm_up_s_min=0.0, warm_up_s_max=0.01, case_s_max=0.02),
        num_threads=torch.get_num_threads(),
    )
    watching = open_sentinel(rig, seed=0)
    watching.check(rig.stopwatch.now_s())
    assert set(watching.checks[0].drifts) == {"gemm", "copy"}
    assert min(watching.checks[0].drifts.values()) > -1.0
