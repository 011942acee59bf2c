"""Numbers beyond what is anywhere are refused, not tried: ranks and batches are made one by one."""

from collections.abc import Callable

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.requests.cluster import ReplicaPool
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.workload import WorkloadSpec

_HUGE = 2**62


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ParallelLayout(dp=_HUGE), "layout"),
        (lambda: ParallelLayout(tp=1024, pp=1024, dp=2), "layout"),
        (lambda: ParallelLayout(ep=_HUGE), "layout"),
        (lambda: ReplicaPool(name="a", num_replicas=_HUGE), "num_replicas"),
        (lambda: EngineSpec(max_num_seqs=_HUGE), "max_num_seqs"),
        (lambda: EngineSpec(num_kv_blocks=_HUGE), "num_kv_blocks"),
        (lambda: WorkloadSpec(num_requests=_HUGE), "num_requests"),
        *(
            (
                lambda name=name: TrainingScenario(
                    model="llama-2-7b", device="a30", **{name: _HUGE}
                ),
                name,
            )
            for name in ("sequence_length", "global_batch_size", "virtual_stages")
        ),
    ],
)
def test_what_nobody_has_is_refused_by_its_name(make: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make()
    assert [item.field for item in caught.value.violations] == [field]


def test_the_largest_clusters_there_are_can_be_asked_about() -> None:
    assert ParallelLayout(tp=8, pp=16, dp=1024).num_devices == 131_072
