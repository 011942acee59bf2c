"""Memory planned without times: hand-counted states, micro batches in flight, and reasons."""

import json
from dataclasses import replace
from typing import Any

import pytest
from training_memory_graphs import chunk_graphs, follow, memory_scenario

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.graph import Section
from foretoken.simulator.steps.held.in_flight import find_moments, settle_micro_batches
from foretoken.simulator.steps.parameters import number_layer_kinds
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.steps.sharding import cut_shards
from foretoken.simulator.training.memory_plan import measure_stages, plan_memory

# Weights of llama-2-7b: a table, 32 layers of four square and three MLP matrices and two norms, a
# norm and a head.
_LLAMA_7B = 32000 * 4096 * 2 + 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096


def _most_in_flight(schedule: str, num_ranks: int, num_micro_batches: int) -> list[int]:
    moments = find_moments(find_schedule(schedule), num_ranks, num_micro_batches, 1)
    return [int(rank.counts[:, 0].sum(axis=-1).max()) for rank in moments]


def test_a_plan_counts_states_by_hand() -> None:
    """Two bytes a weight, four a summed gradient, twelve of the optimizer, halved by ZeRO 1."""
    scenario = memory_scenario("llama-2-7b", tp=1, pp=1, dp=2, zero_stage=1)
    report = plan_memory(scenario)
    (stage,) = report.memory
    trainer = scenario.trainer.resolve()
    gradient = trainer.gradient_dtype or scenario.dtype
    assert report.num_params == _LLAMA_7B
    assert stage.weights_bytes == 2 * _LLAMA_7B
    assert stage.gradients_bytes == gradient.num_bytes * _LLAMA_7B
    assert stage.optimizer_bytes == 12 * _LLAMA_7B / 2
    assert report.num_devices == 2
    assert report.device_memory_bytes == stage.device_bytes
    assert json.loads(report.scenario_json)["zero_stage"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"pp": 4, "recompute": "selective"},
        {"pp": 4, "recompute": "full", "recompute_layers": 2},
        {"pp": 2, "virtual_stages": 4, "pipeline_schedule": "interleaved"},
        {"pp": 4, "pipeline_schedule": "gpipe"},
        {"pp": 4, "global_batch_size": 160},
        {"model": "gpt-oss-20b", "pp": 4, "dp": 2, "ep": 2, "zero_stage": 3},
    ],
)
def test_a_plan_is_what_following_all_passes_says(changes: dict[str, Any]) -> None:
    """Chunks that are alike are lowered once, and only as many micro batches run as are held."""
    scenario = memory_scenario(**{"model": "llama-2-7b", **changes})
    planned, (followed, _) = measure_stages(scenario), follow(scenario)
    assert [stage.reserved_bytes for stage in planned] == pytest.approx(
        [stage.reserved_bytes for stage in followed], rel=1e-12
    )
    assert [stage.num_in_flight for stage in planned] == pytest.approx(
        [stage.num_in_flight for stage in followed], rel=1e-12
    )


def test_what_does_not_fit_has_advice() -> None:
    report = plan_memory(memory_scenario("llama-2-70b", tp=2))
    assert not report.feasibility.is_feasible
    assert "what would help most" in report.feasibility.reason
    assert report.memory[0].advice.startswith("what would help most")


def test_a_layout_that_does_not_divide_is_a_result() -> None:
    report = plan_memory(memory_scenario("llama-2-7b", tp=3))
    assert not report.feasibility.is_feasible
    assert "layout.tp" in report.feasibility.reason
    assert report.memory == ()


def test_numbers_that_do_not_suit_the_schedule_are_a_result() -> None:
    """Seven micro batches over four ranks, however many of them a rank would hold."""
    scenario = memory_scenario(
        "llama-2-7b",
        pp=4,
        virtual_stages=2,
        pipeline_schedule="interleaved",
        global_batch_size=31,
    )
    report = plan_memory(scenario)
    assert "groups of pp (4)" in report.feasibility.reason


def test_a_batch_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="global_batch_size"):
        plan_memory(memory_scenario("llama-2-7b", dp=3))


def test_ranks_hold_the_micro_batches_the_papers_say() -> None:
    """GPipe all, 1F1B as many as ranks follow, ZB-H1 no more than the first rank of 1F1B."""
    assert _most_in_flight("gpipe", 4, 100) == [100] * 4
    assert _most_in_flight("one_f_one_b", 4, 100) == [4, 3, 2, 1]
    assert _most_in_flight("one_f_one_b", 4, 2) == [2, 2, 2, 1]
    assert _most_in_flight("zero_bubble_h1", 4, 100) == [4, 3, 2, 1]
    assert max(_most_in_flight("zero_bubble_v", 4, 100)) == 2 * 4


def test_only_schedules_with_a_steady_state_need_fewer_micro_batches() -> None:
    scenario = memory_scenario(pp=4, global_batch_size=400)
    assert settle_micro_batches(scenario, find_schedule("one_f_one_b")) < 16
    assert settle_micro_batches(scenario, find_schedule("gpipe")) == 400


def test_layers_are_alike_that_the_same_operators_run_in() -> None:
    """DeepSeek's first layers have no experts; an operator may run in every other layer."""
    (dense,), (sparse,) = (
        chunk_graphs(memory_scenario(name)) for name in ("llama-2-7b", "deepseek-v3")
    )
    every_other = replace(dense.forward[-5], section=Section.LAYER, first_layer=1)
    every_other = replace(every_other, layer_stride=2, repeat=16)
    assert set(number_layer_kinds(dense.forward, 32)) == {0}
    assert number_layer_kinds(sparse.forward, 61) == (0,) * 3 + (1,) * 58
    assert number_layer_kinds((*dense.forward, every_other), 32) == (0, 1) * 16


@pytest.mark.parametrize(("num_ranks", "wanted", "shards"), [(8, 0, 8), (8, 3, 2), (6, 100, 6)])
def test_experts_are_split_over_a_divisor(num_ranks: int, wanted: int, shards: int) -> None:
    assert cut_shards(num_ranks, wanted) == shards
