"""The closed form of memory says what following every pass of a strategy says."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import OVERLAPS, WEIGHT_PARALLELS
from foretoken.domain.results.training_report import StageMemory
from foretoken.simulator.search.training.memory import measure_strategies
from foretoken.simulator.steps.held.in_flight import find_moments
from foretoken.simulator.steps.legality import LEGAL, judge_legality
from foretoken.simulator.steps.pipelines.schedule import (
    RankOrder,
    all_schedules,
    find_schedule,
    order_step,
    with_chunks,
)
from foretoken.simulator.steps.strategies import AXES, Strategies, StrategySource
from foretoken.simulator.training.memory.measure import measure_memory

_SCHEDULES = tuple(sorted(all_schedules()))
_DEVICES = 16


def _shrink(name: str, num_layers: int) -> ModelArchitecture:
    model = find_model(name)
    if model.moe is None or not model.moe.num_dense_layers:
        return replace(model, num_layers=num_layers)
    return replace(model, num_layers=num_layers, moe=replace(model.moe, num_dense_layers=2))


# Tied and not, with biases, of several kinds of layers, with experts in all or in some.
_MODELS = (
    replace(find_model("tiny-llama"), num_layers=6),
    _shrink("llama-3.2-1b", 5),
    _shrink("gpt-oss-20b", 6),
    _shrink("qwen3-30b-a3b", 4),
    _shrink("deepseek-v3", 7),
    _shrink("gpt-neox-20b", 4),
)
_TRAINERS = ("plain", "megatron-core", "torchtitan", "internevo", "megatron-deepspeed-bf16")


def _powers(most: int) -> st.SearchStrategy[int]:
    return st.sampled_from([1 << power for power in range(most.bit_length())])


@st.composite
def _scenarios(draw: st.DrawFn) -> TrainingScenario:
    recompute_layers = draw(st.sampled_from((0, 0, 1)))
    return TrainingScenario(
        model=draw(st.sampled_from(_MODELS)),
        device="h200_sxm",
        dtype=draw(st.sampled_from((DType.BF16, DType.BF16, DType.FP8))),
        layout=ParallelLayout(dp=_DEVICES),
        sequence_length=512,
        trainer=TrainerSpec(profile=draw(st.sampled_from(_TRAINERS))),
        recompute="full",
        recompute_layers=recompute_layers,
        partitions_activations=draw(st.booleans()),
        shard_degree=0,
    )


@st.composite
def _strategies(draw: st.DrawFn) -> Strategies:
    """Return some strategies of one space, legal or not."""
    count = 5
    columns: dict[str, st.SearchStrategy[int]] = {
        "device": st.just(0),
        "num_devices": st.just(_DEVICES),
        "global_batch_size": st.sampled_from((32, 64)),
        "tp": _powers(4),
        "pp": st.sampled_from((1, 1, 2, 2, 4, 5)),
        "virtual_stages": st.sampled_from((1, 1, 2, 3)),
        "cp": _powers(2),
        "ep": st.sampled_from((1, 1, 2, 4)),
        "micro_batch_size": _powers(4),
        "sequence_parallel": st.integers(0, 1),
        "zero_stage": st.integers(0, 3),
        "shard_degree": st.sampled_from((0, 0, 0, 2)),
        "overlap": st.integers(0, len(OVERLAPS) - 1),
        "recompute": st.integers(0, 2),
        "weight_parallel": st.sampled_from((0, 0, 0, 1, 2, 3)),
        "weight_degree": _powers(4),
        "pipeline_schedule": st.integers(0, len(_SCHEDULES) - 1),
    }
    drawn = {
        name: np.array(draw(st.lists(values, min_size=count, max_size=count)), dtype=np.int64)
        for name, values in columns.items()
    }
    is_isp = drawn["weight_parallel"] == WEIGHT_PARALLELS.index("isp")
    drawn["weight_degree"] = np.where(is_isp, drawn["weight_degree"], 0)
    drawn["shard_degree"] = np.where(drawn["zero_stage"] > 0, drawn["shard_degree"], 0)
    own = np.array([find_schedule(name).virtual_stages for name in _SCHEDULES])
    own = own[drawn["pipeline_schedule"]]
    drawn["virtual_stages"] = np.where(own > 0, own, drawn["virtual_stages"])
    source = StrategySource(
        scenario=draw(_scenarios()), devices=("h200_sxm",), pipeline_schedules=_SCHEDULES
    )
    return Strategies(source=source, **{name: drawn[name] for name in AXES})


def _follow(scenario: TrainingScenario) -> tuple[StageMemory, ...]:
    """Return what the simulator says, all chunks and micro batches one by one."""
    schedule = find_schedule(scenario.pipeline_schedule)
    scenario = with_chunks(scenario, schedule)
    return measure_memory(scenario, order_step(scenario, schedule))[0]


@settings(max_examples=20)
@given(strategies=_strategies())
def test_the_closed_form_is_the_fullest_stage_of_the_simulator(strategies: Strategies) -> None:
    legal = strategies.take(judge_legality(strategies) == LEGAL)
    assume(len(legal))
    found = measure_strategies(legal)
    for row in range(min(2, len(legal))):
        fullest = min(_follow(legal.scenario(row)), key=lambda stage: stage.margin_bytes)
        assert found.reserved_bytes[row] == pytest.approx(fullest.reserved_bytes, rel=1e-9)
        assert found.margin_bytes[row] == pytest.approx(fullest.margin_bytes, rel=1e-9, abs=64)


def test_nothing_is_asked_of_no_strategies() -> None:
    source = StrategySource(
        scenario=TrainingScenario(model=_MODELS[0], device="h200_sxm"),
        devices=("h200_sxm",),
        pipeline_schedules=("one_f_one_b",),
    )
    none = Strategies(source=source, **{name: np.zeros(0, dtype=np.int64) for name in AXES})
    assert len(measure_strategies(none).fits) == 0


@given(
    name=st.sampled_from(_SCHEDULES),
    num_ranks=st.integers(1, 6),
    num_micro_batches=st.integers(1, 48),
    virtual_stages=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_the_moments_of_a_rank_hold_as_much_as_any_of_its_order(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int, seed: int
) -> None:
    """Whatever chunks need, the fullest moment is among them, and none is made up."""
    schedule = find_schedule(name)
    try:
        orders = schedule.orders(num_ranks, num_micro_batches, virtual_stages)
    except InvalidRequestError:
        assume(condition=False)
    moments = find_moments(schedule, num_ranks, num_micro_batches, virtual_stages)
    chunks = 1 + max(item.chunk for order in orders for slot in order for item in slot)
    needs = np.random.default_rng(seed).integers(0, 100, (4, chunks))
    for order, rank in zip(orders, moments, strict=True):
        held = np.tensordot(rank.counts, needs[:, list(rank.chunks)], ([1, 2], [0, 1]))
        assert int(held.max()) == _hold_most(order, needs)


def _hold_most(order: RankOrder, needs: np.ndarray) -> int:
    """Return the most that a rank holds, pass by pass.

    `needs` are of each chunk: a whole micro batch, half of one, and what a forward and a backward
    pass take.
    """
    whole, half, forward, backward = needs
    kept, most = 0, 0
    for slot in order:
        kept += sum(whole[item.chunk] for item in slot if item.kind == "forward")
        passing = sum(
            forward[item.chunk] if item.kind == "forward" else backward[item.chunk]
            for item in slot
            if item.kind != "backward_weight"
        )
        most = max(most, kept + passing)
        for item in slot:
            if item.kind in {"backward", "backward_input"}:
                kept -= whole[item.chunk]
            if item.kind == "backward_input":
                kept += half[item.chunk]
            if item.kind == "backward_weight":
                kept -= half[item.chunk]
    return int(most)
