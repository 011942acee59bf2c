"""What a framework cannot do is refused with a way out, and what was measured is possible."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training_fakes import RooflinePredictor, build_scenario

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerCapabilities, TrainerSpec, all_trainers
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.steps.trainer_limit import check_trainer
from foretoken.simulator.training.memory_plan import plan_memory
from foretoken.simulator.training.step import simulate_training

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
from training_rows import read_steps

_MIXTRAL = find_model("mixtral-8x7b")


def _of(profile: str, layout: ParallelLayout, **changes: Any) -> TrainingScenario:
    rules = changes.pop("rules", {})
    trainer = TrainerSpec(profile=profile, rules=rules)
    return build_scenario(layout, trainer=trainer, global_batch_size=64, **changes)


def _refused_keys(scenario: TrainingScenario) -> set[str]:
    try:
        check_trainer(scenario)
    except InvalidRequestError as err:
        return {violation.field for violation in err.violations}
    return set()


@pytest.mark.parametrize(
    ("profile", "layout", "changes", "key"),
    [
        ("megatron-core", {"tp": 2}, {"weight_parallel": "isp"}, "weight_parallel"),
        ("megatron-core", {"tp": 2}, {"weight_parallel": "fsp"}, "weight_parallel"),
        ("megatron-core", {"pp": 2}, {"pipeline_schedule": "dualpipe"}, "pipeline_schedule"),
        ("megatron-core", {"pp": 2, "dp": 2}, {"zero_stage": 2}, "zero_stage"),
        ("megatron-core", {"tp": 2}, {"model": _MIXTRAL}, "sequence_parallel"),
        (
            "megatron-core",
            {},
            {"recompute": "selective", "recompute_layers": 2},
            "recompute_layers",
        ),
        (
            "megatron-core",
            {"tp": 2},
            {"rules": {"overlaps_tensor_collectives": "true"}},
            "trainer.rules.overlaps_tensor_collectives",
        ),
        ("torchtitan", {"dp": 2}, {"zero_stage": 1}, "zero_stage"),
        (
            "torchtitan",
            {"dp": 2},
            {"zero_stage": 3, "model": _MIXTRAL, "moe_capacity_factor": 1.0},
            "moe_capacity_factor",
        ),
        ("torchtitan", {"tp": 2, "dp": 2}, {"zero_stage": 2}, "sequence_parallel"),
        ("torchtitan", {"dp": 2, "cp": 2}, {"zero_stage": 3, "shard_degree": 1}, "shard_degree"),
        (
            "torchtitan",
            {"cp": 2, "dp": 2},
            {"zero_stage": 3, "context_parallel": "all_to_all"},
            "context_parallel",
        ),
        ("torchtitan", {"dp": 4}, {"zero_stage": 3, "sequence_length": 2047}, "sequence_length"),
        ("megatron-deepspeed", {"tp": 2, "cp": 2}, {"context_parallel": "all_to_all"}, "layout.cp"),
        ("megatron-deepspeed", {"pp": 5}, {}, "stage_layers"),
        ("megatron-deepspeed", {"dp": 4}, {"zero_stage": 1, "shard_degree": 2}, "shard_degree"),
        ("deepspeed-zero3-2021", {"pp": 2}, {"zero_stage": 3}, "layout.pp"),
        ("gpt-neox", {"pp": 2, "dp": 2}, {"zero_stage": 3}, "zero_stage"),
        ("gpt-neox", {"tp": 2}, {"sequence_parallel": True}, "sequence_parallel"),
        ("internevo", {"tp": 2}, {"weight_parallel": "isp", "recompute": "selective"}, "recompute"),
        ("internlm-2023", {"dp": 2}, {"zero_stage": 3}, "zero_stage"),
        ("megatron-lm-2021", {"dp": 2}, {"zero_stage": 1}, "zero_stage"),
        ("megatron-lm-2022", {"cp": 2}, {}, "layout.cp"),
        ("megatron-lm-2022", {}, {"dtype": DType.FP8}, "dtype"),
        ("transformers", {"pp": 2}, {}, "layout.pp"),
    ],
)
def test_what_a_framework_lacks_names_the_key_to_change(
    profile: str, layout: dict[str, int], changes: dict[str, Any], key: str
) -> None:
    """Without a limit, and by the rules of no framework, the same runs."""
    scenario = _of(profile, ParallelLayout(**layout), **{"sequence_length": 2048, **changes})
    assert key in _refused_keys(scenario)
    for trainer in (TrainerSpec(profile=profile, rules={"can": "{}"}), TrainerSpec()):
        assert set() == _refused_keys(replace(scenario, trainer=trainer))


@pytest.mark.parametrize(
    ("profile", "layout", "changes"),
    [
        ("megatron-core", {"tp": 2, "pp": 2}, {"sequence_parallel": True, "zero_stage": 1}),
        ("megatron-core", {"dp": 4}, {"zero_stage": 3, "shard_degree": 2}),
        # One interleaved chunk is the plain schedule.
        ("gpt-neox", {"pp": 2}, {"pipeline_schedule": "interleaved"}),
        ("torchtitan", {"dp": 4}, {}),
        ("torchtitan", {"dp": 4, "cp": 2}, {"zero_stage": 3, "recompute": "selective"}),
        ("megatron-deepspeed", {"pp": 4}, {"pipeline_schedule": "zero_bubble_h1"}),
        ("megatron-deepspeed", {"cp": 2, "dp": 2}, {"context_parallel": "all_to_all"}),
        ("internevo", {"tp": 4}, {"weight_parallel": "isp"}),
        ("internlm-2023", {"dp": 2}, {"recompute": "selective", "zero_stage": 1}),
        ("transformers", {"dp": 2, "cp": 2}, {"zero_stage": 3}),
    ],
)
def test_what_a_framework_has_is_not_refused(
    profile: str, layout: dict[str, int], changes: dict[str, Any]
) -> None:
    assert set() == _refused_keys(
        _of(profile, ParallelLayout(**layout), **{"sequence_length": 2048, **changes})
    )


@pytest.mark.parametrize(
    "ask",
    [lambda scenario: simulate_training(scenario, RooflinePredictor(), None), plan_memory],
    ids=["simulate", "memory"],
)
def test_a_scenario_that_asks_for_it_is_told_of_a_way(
    ask: Callable[[TrainingScenario], Any],
) -> None:
    scenario = _of("megatron-core", ParallelLayout(tp=2), weight_parallel="isp")
    with pytest.raises(InvalidRequestError, match=r"trainer\.profile=plain") as refused:
        ask(scenario)
    assert {"weight_parallel"} == {item.field for item in refused.value.violations}


def test_every_measured_step_was_possible(shared_data: Path) -> None:
    """They were run by their frameworks, so a refusal would be a wrong capability."""
    steps = list(read_steps(shared_data / "training_truth"))
    assert len(steps) > 500
    refused = {(step.source, *_refused_keys(step.scenario)) for step in steps}
    assert set() == {item for item in refused if len(item) > 1}


def test_every_framework_says_what_it_can_and_where_that_was_read() -> None:
    for name, profile in all_trainers().items():
        is_bounded = bool(profile.can.has and profile.can.conflicts)
        assert (name != "plain") == is_bounded
        assert is_bounded == bool(profile.can.source)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"has": {"stages": [1]}}, "can.has.stages"),
        ({"conflicts": [{"of": {}, "why": "x"}]}, "names nothing"),
        ({"conflicts": [{"of": {"ZeRO": [1]}, "why": "x"}]}, "is no aspect"),
        ({"switches": ["overlaps_everything"]}, "overlaps_everything"),
    ],
)
def test_aspects_there_are_not_are_refused(content: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        schema.decode(TrainerCapabilities, content, "can")
