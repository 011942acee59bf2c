"""Collectives really run between processes of this machine, and leave none behind."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.operators.spec.operator import all_operators
from foretoken.domain.operators.spec.overlap import call_alone, call_during, is_group_call
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.ranks.group import (
    CollectiveGroup,
    CollectiveTimingError,
    GroupLostError,
    GroupSpec,
)
from foretoken.profiler.ranks.rows import in_group_order, time_collectives
from foretoken.profiler.recording.batches import RowBuilder
from foretoken.profiler.timing.timer import TimingSummary

# A busy machine may run what should be concurrent one after the other.
_NUM_TRIES = 10
FAST = TimerSpec(
    min_samples=3, warm_up_s_min=0.0, warm_up_s_max=0.002, case_s_max=0.01, sample_us_min=50.0
)
ROWS = RowBuilder("cpu", "torch", "0")
COLLECTIVES = [name for name, spec in all_operators().items() if spec.is_collective]
GEMM = OperatorCall(operator="gemm", dtype=DType.FP32, dims={"m": 64, "n": 64, "k": 64})


def call_of(
    operator: str,
    message_bytes: int = 8192,
    group: tuple[int, int] = (2, 1),
    variant: str = "",
    dtype: DType = DType.FP32,
) -> OperatorCall:
    dims = {"message_bytes": message_bytes, "devices_per_node": group[0], "num_nodes": group[1]}
    return OperatorCall(operator=operator, dtype=dtype, dims=dims, variant=variant)


def spec_of(num_ranks: int) -> GroupSpec:
    return GroupSpec(num_ranks=num_ranks, is_cuda=False, seed=0, timer=FAST)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def group() -> Iterator[CollectiveGroup]:
    opened = CollectiveGroup(spec_of(3))
    opened.open()
    pids = opened.pids
    yield opened
    opened.close()
    assert [] == [pid for pid in pids if is_running(pid)]


@pytest.mark.slow
@pytest.mark.parametrize("operator", COLLECTIVES)
def test_collective_is_timed(group: CollectiveGroup, operator: str) -> None:
    summary = group.time(call_of(operator))
    assert summary.num_samples >= 3
    assert 0.0 < summary.latency_us_min <= summary.latency_us_median <= summary.latency_us_max


@pytest.mark.slow
@pytest.mark.parametrize("operator", [name for name in COLLECTIVES if name != "send_recv"])
def test_more_ranks_than_two_are_timed(group: CollectiveGroup, operator: str) -> None:
    assert group.time(call_of(operator, group=(3, 1))).num_samples >= 3


@pytest.mark.slow
def test_a_ring_of_transfers_joins_more_than_a_pair(group: CollectiveGroup) -> None:
    assert group.time(call_of("send_recv", group=(3, 1), variant="pattern=ring")).num_samples >= 3
    with pytest.raises(CollectiveTimingError, match="pattern=ring"):
        group.time(call_of("send_recv", group=(3, 1)))


@pytest.mark.slow
def test_larger_message_takes_longer(group: CollectiveGroup) -> None:
    small = group.time(call_of("all_reduce", 1024))
    large = group.time(call_of("all_reduce", 2**23))
    assert large.latency_us_min > small.latency_us_min


@pytest.mark.slow
def test_computation_and_communication_are_timed_beside_each_other(group: CollectiveGroup) -> None:
    collective = call_of("all_reduce", 2**16)
    for call in (
        call_alone(GEMM, 2, 1),
        call_during(GEMM, collective),
        call_during(collective, GEMM),
    ):
        assert _time_patiently(group, call).latency_us_median > 0.0


def _time_patiently(group: CollectiveGroup, call: OperatorCall) -> TimingSummary:
    """Time a call, again where a machine with as many ranks as cores kept the two apart."""
    for _ in range(_NUM_TRIES - 1):
        with suppress(CollectiveTimingError):
            return group.time(call)
    return group.time(call)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (call_of("gather"), "UnknownOperatorError"),
        (call_of("all_reduce", variant="redop=max"), "no code runs all_reduce with redop"),
        (call_of("all_reduce", variant="graph=true"), "needs a CUDA device"),
        (call_of("all_reduce", 2**50), "DeviceMemoryError"),
        (call_of("all_reduce", dtype=DType.FP4), "torch has no fp4"),
        (call_of("all_reduce", group=(4, 1)), "there are 3 on each of 1"),
        (call_of("all_reduce", group=(2, 2)), "2 ranks on each of 2 nodes"),
        (call_during(GEMM, GEMM), "neither call communicates"),
    ],
)
def test_call_that_cannot_be_timed_says_why_and_the_group_lives_on(
    group: CollectiveGroup, call: OperatorCall, reason: str
) -> None:
    with pytest.raises(CollectiveTimingError, match=reason) as caught:
        group.time(call)
    assert not isinstance(caught.value, GroupLostError)
    assert group.time(call_of("all_reduce")).num_samples >= 3


@pytest.mark.slow
def test_group_that_lost_a_rank_says_so_and_can_be_opened_again() -> None:
    opened = CollectiveGroup(spec_of(2))
    opened.open()
    os.kill(opened.pids[1], signal.SIGKILL)
    with pytest.raises(GroupLostError, match=r"rank 1 died|a rank is gone"):
        opened.time(call_of("all_reduce"))
    opened.open()
    assert opened.time(call_of("all_reduce")).num_samples >= 3
    pids = opened.pids
    opened.close()
    assert [] == [pid for pid in pids if is_running(pid)]


@pytest.mark.slow
def test_every_call_gives_a_row_in_group_order() -> None:
    calls = [
        call_of("all_gather", group=(9, 1)),
        call_of("all_reduce"),
        call_of("send_recv"),
        call_alone(GEMM, 2, 1),
    ]
    rows = list(time_collectives(calls, spec_of(2), ROWS, "cpu_loopback"))
    ordered = in_group_order(calls)
    assert calls[0] == ordered[-1]
    assert [c.operator for c in ordered] == [row["operator"] for row in rows]
    assert ["ok", "ok", "ok", "failed"] == [row["status"] for row in rows]
    assert {"cpu_loopback"} == {row["topology"] for row in rows}
    by_operator = {row["operator"]: row for row in rows}
    assert "torch.distributed(gloo)" == by_operator["send_recv"]["kernel"]
    assert call_alone(GEMM, 2, 1).variant == by_operator["gemm"]["variant"] != ""
    assert "" != by_operator["gemm"]["kernel"]


def test_what_needs_a_group_is_known_by_its_variant() -> None:
    assert is_group_call(call_of("broadcast"))
    assert is_group_call(call_alone(GEMM, 2, 1))
    assert not is_group_call(GEMM)
