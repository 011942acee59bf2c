"""Collectives really run between processes of this machine, and leave none behind."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken.domain.estimate import DType, OperatorCall
from foretoken.domain.operator import all_operators
from foretoken.profiler.collectives import (
    CollectiveGroup,
    CollectiveTimingError,
    GroupLostError,
    GroupSpec,
)
from foretoken.profiler.config import TimerSpec

FAST = TimerSpec(min_samples=3, warm_up_s_min=0.0, warm_up_s_max=0.002, case_s_max=0.01)


def call_of(operator: str, message_bytes: int = 8192) -> OperatorCall:
    dims = {"message_bytes": message_bytes, "devices_per_node": 2, "num_nodes": 1}
    return OperatorCall(operator=operator, dtype=DType.FP32, dims=dims)


@pytest.fixture(scope="module")
def group() -> Iterator[CollectiveGroup]:
    opened = CollectiveGroup(GroupSpec(num_ranks=2, is_cuda=False, seed=0, timer=FAST))
    opened.open()
    pids = opened.pids
    yield opened
    opened.close()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize(
    "operator", [name for name, spec in all_operators().items() if spec.is_collective]
)
def test_collective_is_timed(group: CollectiveGroup, operator: str) -> None:
    summary = group.time(call_of(operator))
    assert summary.num_samples >= 3
    assert 0.0 < summary.latency_us_min <= summary.latency_us_median <= summary.latency_us_max


def test_larger_message_takes_longer(group: CollectiveGroup) -> None:
    small = group.time(call_of("all_reduce", 1024))
    large = group.time(call_of("all_reduce", 2**23))
    assert large.latency_us_min > small.latency_us_min


def test_unknown_collective_fails_and_the_group_lives_on(group: CollectiveGroup) -> None:
    with pytest.raises(CollectiveTimingError, match="no code runs"):
        group.time(call_of("broadcast"))
    assert group.time(call_of("all_reduce")).num_samples >= 3


def test_group_that_lost_its_ranks_says_so() -> None:
    lonely = CollectiveGroup(GroupSpec(num_ranks=1, is_cuda=False, seed=0, timer=FAST))
    lonely.open()
    os.kill(lonely.pids[0], signal.SIGKILL)
    with pytest.raises(GroupLostError):
        lonely.time(call_of("all_reduce"))
    lonely.close()
