"""Collectives with NCCL on real GPUs; one GPU is a group of one rank, which still runs the code."""

from collections.abc import Iterator

import pytest
import torch

from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.operators.spec.operator import all_operators
from foretoken.domain.operators.spec.overlap import call_alone, call_during
from foretoken.profiler.config import TimerSpec
from foretoken.profiler.local_device import list_local_devices
from foretoken.profiler.ranks.group import CollectiveGroup
from foretoken.profiler.ranks.group_spec import GroupSpec
from foretoken.profiler.ranks.rows import describe_links

if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)
pytestmark = pytest.mark.gpu

_TIMER = TimerSpec(min_samples=5, warm_up_s_max=0.05, case_s_max=0.2)
_GEMM = OperatorCall(operator="gemm", dtype=DType.BF16, dims={"m": 2048, "n": 2048, "k": 2048})
_COLLECTIVES = [
    name for name, spec in all_operators().items() if spec.is_collective and name != "send_recv"
]
_needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def call_of(
    operator: str, num_ranks: int, message_bytes: int = 2**20, variant: str = ""
) -> OperatorCall:
    dims = {"message_bytes": message_bytes, "devices_per_node": num_ranks, "num_nodes": 1}
    return OperatorCall(operator=operator, dtype=DType.BF16, dims=dims, variant=variant)


@pytest.fixture(scope="module")
def group() -> Iterator[CollectiveGroup]:
    num_ranks = torch.cuda.device_count()
    opened = CollectiveGroup(GroupSpec(num_ranks=num_ranks, is_cuda=True, seed=0, timer=_TIMER))
    opened.open()
    yield opened
    opened.close()


@pytest.mark.parametrize("operator", _COLLECTIVES)
def test_collective_is_timed(group: CollectiveGroup, operator: str) -> None:
    summary = group.time(call_of(operator, torch.cuda.device_count()))
    assert 0.0 < summary.latency_us_min <= summary.latency_us_median <= summary.latency_us_max


def test_a_graph_of_collectives_is_timed(group: CollectiveGroup) -> None:
    call = call_of("all_reduce", torch.cuda.device_count(), 2**12, "graph=true")
    assert group.time(call).latency_us_median > 0.0


def test_what_cannot_be_timed_leaves_the_group_alive(group: CollectiveGroup) -> None:
    num_ranks = torch.cuda.device_count()
    with pytest.raises(Exception, match="DeviceMemoryError"):
        group.time(call_of("all_reduce", num_ranks, 2**50))
    assert group.time(call_of("all_reduce", num_ranks)).latency_us_median > 0.0


def test_a_product_is_timed_alone_and_beside_communication(group: CollectiveGroup) -> None:
    num_ranks = torch.cuda.device_count()
    alone = group.time(call_alone(_GEMM, num_ranks, 1))
    beside = group.time(call_during(_GEMM, call_of("all_reduce", num_ranks, 2**26)))
    assert min(alone.latency_us_min, beside.latency_us_min) > 0.0


@_needs_two
def test_transfers_between_two_devices_stay_below_the_speed_of_light(
    group: CollectiveGroup,
) -> None:
    """1 GB in under 0.1 ms would be 10 TB/s, which no link has."""
    summary = group.time(call_of("send_recv", 2, 2**30))
    assert summary.latency_us_median > 100.0


def test_links_are_described() -> None:
    [device] = [found for found in list_local_devices() if found.is_cuda][:1]
    described = describe_links(device, {"NCCL_ALGO": "Ring", "HOME": "/root"})
    assert "Ring" == described["nccl_algo"]
    assert "home" not in described
    assert described["nccl"].count(".") >= 1
    assert "peer_access" in described
