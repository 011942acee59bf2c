"""Files that start training ask for the strategy they were written for."""

from dataclasses import dataclass, fields, replace
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.estimate import DType
from foretoken.domain.layout import ParallelLayout
from foretoken.domain.models.architecture import find_model
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.trainer import TrainerSpec
from foretoken.simulator.launch.framework import all_frameworks
from foretoken.simulator.launch.trainer import TrainingLaunch, plan_job, strategy_of
from foretoken.simulator.launch.write_training import check_launched

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Space:
    """What scenarios are drawn from."""

    models: tuple[str, ...] = (
        *("llama-3.1-8b", "llama-3.1-405b", "qwen3-8b", "mixtral-8x7b", "deepseek-v3"),
    )
    schedules: tuple[str, ...] = ("one_f_one_b", "interleaved", "gpipe", "zero_bubble_v")
    pipelines: tuple[int, ...] = (1, 2, 4)
    contexts: tuple[int, ...] = (1, 2)
    exchanges: tuple[str, ...] = ("ring", "all_to_all")
    recompute: tuple[str, ...] = ("none", "selective", "full")
    recompute_layers: tuple[int, ...] = (0, 1, 2)
    modules: tuple[tuple[str, ...], ...] = ((), ("layernorm", "mlp"), ("moe_act", "core_attention"))
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    shard_degrees: tuple[int, ...] = (0, 2)
    has_sequence_parallel: tuple[bool, ...] = (False, True)
    dtypes: tuple[DType, ...] = (DType.BF16, DType.FP16, DType.FP8, DType.FP32)


_EVERYTHING = _Space()
# What each framework can mostly do, so that few draws are refused.
_SPACES = {
    "megatron-core": _Space(
        schedules=("one_f_one_b", "interleaved"),
        zero_stages=(0, 1, 1),
        has_sequence_parallel=(True,),
        dtypes=(DType.BF16, DType.FP8),
    ),
    "torchtitan": _Space(
        models=("llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b"),
        exchanges=("ring",),
        recompute_layers=(0,),
        modules=((), ("every_other_matmul",), ("mlp",)),
        zero_stages=(2, 3),
        has_sequence_parallel=(True,),
        dtypes=(DType.BF16, DType.FP8, DType.FP32),
    ),
    "deepspeed": _Space(
        models=("llama-3.1-8b", "gpt3-175b", "mixtral-8x7b"),
        schedules=("one_f_one_b", "zero_bubble_h1"),
        pipelines=(1, 1, 2),
        contexts=(1,),
        recompute_layers=(0,),
        modules=((), ("core_attention",)),
        zero_stages=(0, 1),
        shard_degrees=(0,),
        dtypes=(DType.BF16, DType.FP16, DType.FP32),
    ),
}


@st.composite
def _scenarios(draw: st.DrawFn, space: _Space) -> TrainingScenario:
    def some(values: tuple[T, ...]) -> T:
        return draw(st.sampled_from(values))

    model = find_model(some(space.models))
    layout = ParallelLayout(
        tp=some((1, 2, 4)),
        pp=some(space.pipelines),
        dp=some((1, 2, 4, 8)),
        cp=some(space.contexts),
        ep=some((1, 2, 4)) if model.moe else 1,
    )
    schedule, recompute = some(space.schedules), some(space.recompute)
    micro_batch_size, zero_stage = some((1, 2)), some(space.zero_stages)
    is_full = recompute == "full"
    return TrainingScenario(
        model=model,
        device="h100_sxm",
        layout=layout,
        sequence_length=2048,
        micro_batch_size=micro_batch_size,
        global_batch_size=micro_batch_size * some((8, 24)) * layout.dp,
        trainer=TrainerSpec(profile=some(("megatron-core", "torchtitan", "megatron-deepspeed"))),
        pipeline_schedule=schedule,
        virtual_stages=some((1, 2)) if schedule == "interleaved" and layout.pp > 1 else 1,
        recompute=recompute,
        recompute_layers=some(space.recompute_layers) if is_full else 0,
        recompute_modules=some(space.modules) if recompute == "selective" else (),
        partitions_activations=is_full and space is _EVERYTHING and draw(st.booleans()),
        zero_stage=zero_stage,
        shard_degree=some(space.shard_degrees) if zero_stage and layout.dp * layout.cp > 1 else 0,
        sequence_parallel=some(space.has_sequence_parallel),
        context_parallel=some(space.exchanges),
        dtype=some(space.dtypes),
    )


def _launch(framework: str, scenario: TrainingScenario) -> TrainingLaunch:
    check_launched(scenario)
    return all_frameworks()[framework].launch(plan_job(scenario))


@pytest.mark.parametrize("framework", sorted(_SPACES))
@settings(max_examples=100)
@given(data=st.data())
def test_what_files_say_is_the_strategy(framework: str, data: st.DataObject) -> None:
    """Read back, degrees, batches, stages, recomputation and formats are those of the scenario."""
    scenario = data.draw(_scenarios(_SPACES[framework]))
    try:
        launch = _launch(framework, scenario)
    except InvalidRequestError:
        # Hypothesis complains where most are.
        assume(False)
    assert strategy_of(scenario) == all_frameworks()[framework].read(launch.files)


@pytest.mark.parametrize("framework", sorted(_SPACES))
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(scenario=_scenarios(_EVERYTHING))
def test_of_everything_files_say_the_strategy_or_fields_are_told(
    framework: str, scenario: TrainingScenario
) -> None:
    """Nothing else than a strategy's own files, and a refusal names keys of the scenario."""
    try:
        launch = _launch(framework, scenario)
    except InvalidRequestError as err:
        told = {violation.field.partition(".")[0] for violation in err.violations}
        assert told
        assert set() == told - {item.name for item in fields(TrainingScenario)}
        return
    assert strategy_of(scenario) == all_frameworks()[framework].read(launch.files)


@given(scenario=_scenarios(_EVERYTHING))
def test_a_job_has_every_device_once(scenario: TrainingScenario) -> None:
    node = replace(scenario, layout=replace(scenario.layout, tp=scenario.layout.tp * 8))
    job = plan_job(node)
    assert node.layout.num_devices == job.num_nodes * job.devices_per_node
    assert job.devices_per_node == 8
