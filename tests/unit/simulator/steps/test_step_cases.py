"""Cases of a step: arrays agree on their named axes, and a scenario is the columns of one case."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import pytest

from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Floats
from foretoken.simulator.steps.axes import CASE, RANK, PerCase, measure_axes
from foretoken.simulator.steps.strategies import Strategies


@dataclass(frozen=True)
class _Record:
    name: str
    tp: PerCase
    kept: Annotated[Floats, CASE, RANK]


def test_the_arrays_of_a_record_have_the_axes_of_their_types() -> None:
    record = _Record("one", np.ones(3, dtype=np.int64), np.zeros((1, 4)))
    assert measure_axes(record) == {CASE: 3, RANK: 4}


@pytest.mark.parametrize(
    ("kept", "problem"),
    [(np.zeros((2, 4)), "2 of axis case, others 3"), (np.zeros(3), r"not \[case, rank\]")],
)
def test_arrays_that_disagree_are_refused(kept: Floats, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        measure_axes(_Record("one", np.ones(3, dtype=np.int64), kept))


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": ParallelLayout(tp=2, pp=3, dp=4, cp=5), "global_batch_size": 24},
        {"zero_stage": 3, "shard_degree": 2, "layout": ParallelLayout(dp=8)},
        {"weight_parallel": "isp", "weight_degree": 4, "layout": ParallelLayout(tp=4)},
        {"recompute": "full", "recompute_layers": 2, "partitions_activations": True},
        {"pipeline_schedule": "interleaved", "virtual_stages": 3, "sequence_parallel": True},
    ],
)
def test_the_columns_of_a_scenario_are_that_scenario(changes: dict[str, Any]) -> None:
    scenario = TrainingScenario(model=find_model("llama-3-8b"), device="h100_sxm", **changes)
    columns = Strategies.of_scenario(scenario)
    assert measure_axes(columns) == {CASE: 1}
    assert replace(columns.scenario(0), name=scenario.name) == scenario
    assert columns.num_micro_batches.tolist() == [scenario.num_micro_batches]


def test_what_follows_from_degrees_is_that_of_the_scenario() -> None:
    """Of 32 layers in six chunks the largest has six; eight ranks hold the same under ZeRO."""
    scenario = TrainingScenario(
        model=find_model("llama-3-8b"),
        device="h100_sxm",
        layout=ParallelLayout(tp=2, pp=3, dp=4, cp=2),
        virtual_stages=2,
        pipeline_schedule="interleaved",
        zero_stage=1,
    )
    columns = Strategies.of_scenario(scenario)
    assert [16, 8, 8, 1] == [
        int(column[0])
        for column in (
            *(columns.stage_ranks, columns.replicas, columns.shards, columns.weight_parts),
        )
    ]
    assert columns.chunks.tolist() == [2]
    assert columns.max_layers.tolist() == [6]
    assert columns.has_unequal_chunks.tolist() == [True]
