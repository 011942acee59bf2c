"""Numbers beyond what is anywhere are refused, not tried: ranks and batches are made one by one."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.measurements.profiling import GraphRequest
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.cluster import LoraSpec, ReplicaPool
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.numbers import check_numbers
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.requests.workload import SessionSpec, WorkloadSpec

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
        (lambda: LoraSpec(num_adapters=_HUGE), "num_adapters"),
        (lambda: SessionSpec(shared_prefix_tokens=_HUGE), "shared_prefix_tokens"),
        (
            lambda: GraphRequest(device="cpu", model="m", config_json="", sequence_length=_HUGE),
            "sequence_length",
        ),
        (lambda: EngineSpec(rules={"host_us": str(2**53)}).resolve(), "engine.rules.host_us"),
        (lambda: EngineSpec(rules={"launch_us": ".inf"}).resolve(), "engine.rules.launch_us"),
        (
            lambda: TrainerSpec(rules={"vocab_multiple": str(_HUGE)}).resolve(),
            "trainer.rules.vocab_multiple",
        ),
        (lambda: _check_model(hidden=_HUGE), "model"),
        (lambda: _check_model(sliding_window=_HUGE), "model.sliding_window"),
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


def _check_model(**sizes: int) -> None:
    model = replace(find_model("mistral-7b"), **sizes)
    check_numbers(ServingScenario(model=model, device="a30"))


def test_the_largest_clusters_there_are_can_be_asked_about() -> None:
    assert ParallelLayout(tp=8, pp=16, dp=1024).num_devices == 131_072
