"""Files that start training ask for the strategy they were written for."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from foretoken.app.scenario_file import build_training_scenario
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import TrainingSearchRequest, TrainingSpace
from foretoken.simulator.launch.trainer import TrainingLaunch, all_frameworks, plan_job, strategy_of
from foretoken.simulator.launch.training import check_launched, read_training
from foretoken.simulator.search.training.space import resolve_space
from foretoken.simulator.steps.legality import LEGAL, judge_legality

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
    trainers: tuple[str, ...] = ("megatron-core", "torchtitan", "megatron-deepspeed")


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
        trainers=("megatron-deepspeed", "megatron-core"),
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
        trainer=TrainerSpec(profile=some(space.trainers)),
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
@given(data=st.data())
def test_files_are_read_into_the_scenario_they_were_written_of(
    framework: str, data: st.DataObject
) -> None:
    """What is read as a scenario can run, and is written as the same files but for rules."""
    scenario = data.draw(_scenarios(_SPACES[framework]))
    try:
        launch = _launch(framework, scenario)
    except InvalidRequestError:
        assume(False)
    found = read_training(launch.files, needs_model=False)
    given_too = {"model": scenario.model, "device": scenario.device}
    again = build_training_scenario({**found.content}, given_too, Path("read.yaml"))
    assert framework == found.framework
    assert strategy_of(scenario) == strategy_of(again)
    check_launched(again)


@pytest.mark.parametrize("framework", sorted(_SPACES))
@settings(suppress_health_check=[HealthCheck.too_slow])
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


# Models that each framework has, and trainers whose searches it can end.
_SEARCHED = {
    "megatron-core": (
        ("llama-3.1-8b", "mixtral-8x7b"),
        ("megatron-core", "megatron-lm-2022", "megatron-lm-2021", "plain"),
    ),
    "torchtitan": (("llama-3.1-8b", "qwen3-30b-a3b"), ("torchtitan", "plain")),
    "deepspeed": (
        ("llama-3.1-8b", "mixtral-8x7b"),
        ("megatron-deepspeed", "megatron-deepspeed-bf16", "deepspeed-zero3-2021", "plain"),
    ),
}


@st.composite
def _searches(draw: st.DrawFn, framework: str) -> TrainingSearchRequest:
    models, trainers = _SEARCHED[framework]
    trainer = draw(st.sampled_from(trainers))
    scenario = TrainingScenario(
        model=find_model(draw(st.sampled_from(models))),
        device="h100_sxm",
        dtype=DType.FP16 if trainer == "deepspeed-zero3-2021" else DType.BF16,
        layout=ParallelLayout(dp=draw(st.sampled_from((8, 16, 32)))),
        sequence_length=8192,
        global_batch_size=64,
        trainer=TrainerSpec(profile=trainer),
        context_parallel=draw(st.sampled_from(("ring", "all_to_all"))),
        recompute_layers=draw(st.sampled_from((0, 1))),
        shard_degree=draw(st.sampled_from((0, 2))),
        recompute_modules=draw(st.sampled_from(((), ("layernorm",), ("every_other_matmul",)))),
    )
    schedules = draw(st.sampled_from(((), ("zero_bubble_h1", "gpipe"), ("interleaved",))))
    # What the trainer is written for needs no framework besides.
    is_own = trainer == all_frameworks()[framework].profiles[0]
    space = TrainingSpace(pipeline_schedules=schedules, framework="" if is_own else framework)
    return TrainingSearchRequest(scenario=scenario, space=space)


@pytest.mark.parametrize("framework", sorted(_SEARCHED))
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_every_strategy_of_a_search_can_be_written(
    framework: str, data: st.DataObject, seed: int
) -> None:
    """Some of all that are legal: the winner is one of them."""
    space = resolve_space(data.draw(_searches(framework)))
    points = space.piece(0, space.num_points) if space.num_points else space.find_cut()
    legal = points.take(np.flatnonzero(judge_legality(points) == LEGAL))
    rows = np.random.default_rng(seed).permutation(len(legal))[:12]
    for row in rows.tolist():
        scenario = legal.scenario(row)
        launch = _launch(framework, scenario)
        assert strategy_of(scenario) == all_frameworks()[framework].read(launch.files)


@given(scenario=_scenarios(_EVERYTHING))
def test_a_job_has_every_device_once(scenario: TrainingScenario) -> None:
    node = replace(scenario, layout=replace(scenario.layout, tp=scenario.layout.tp * 8))
    job = plan_job(node)
    assert node.layout.num_devices == job.num_nodes * job.devices_per_node
    assert job.devices_per_node == 8
