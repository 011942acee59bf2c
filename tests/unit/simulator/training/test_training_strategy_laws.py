"""Laws of the strategies of a search: legality is the simulator's, and none is counted twice."""

import dataclasses
from functools import cache
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from training_fakes import RooflinePredictor

from foretoken.domain.frameworks.trainer import TrainerSpec
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import TrainingSearchRequest, TrainingSpace
from foretoken.simulator.search.training.canonical import find_redundant
from foretoken.simulator.search.training.outcome import explain
from foretoken.simulator.search.training.space import StrategySpace, resolve_space
from foretoken.simulator.steps.legality import LEGAL, judge_legality
from foretoken.simulator.steps.strategies import AXES, Strategies
from foretoken.simulator.training.step import simulate_training

_LLAMA, _MIXTRAL, _DEEPSEEK = (
    dataclasses.replace(find_model(name), num_layers=6)
    for name in ("tiny-llama", "mixtral-8x7b", "deepseek-v3")
)
_SMALL_MIXTRAL = dataclasses.replace(_MIXTRAL, hidden=256, num_layers=4)
_MODELS = (
    _LLAMA,
    dataclasses.replace(_LLAMA, num_heads=6, num_kv_heads=2, intermediate=1404),
    dataclasses.replace(_LLAMA, position="learned", max_position=256),
    _MIXTRAL,
    _DEEPSEEK,
)
_TRAINERS = ("plain", "torchtitan", "megatron-core", "megatron-deepspeed", "internevo")
_SCHEDULES = (
    *("one_f_one_b", "gpipe", "interleaved", "zero_bubble_h1", "zero_bubble_v", "dualpipe"),
)


def _some(values: tuple[Any, ...], most: int = 2) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.sampled_from(values), min_size=1, max_size=most, unique=True).map(tuple)


@st.composite
def _requests(draw: st.DrawFn) -> TrainingSearchRequest:
    model = draw(st.sampled_from(_MODELS))
    scenario = TrainingScenario(
        model=model,
        device="h100_sxm",
        topology="h100_dgx",
        global_batch_size=draw(st.sampled_from((1, 48, 96))),
        sequence_length=draw(st.sampled_from((96, 256, 512))),
        context_parallel=draw(st.sampled_from(("ring", "all_to_all"))),
        shard_degree=draw(st.sampled_from((0, 2))),
        recompute_layers=draw(st.sampled_from((0, 2))),
        expert_tp=draw(st.sampled_from((0, 2))) if model.moe else 0,
        trainer=TrainerSpec(
            profile=draw(st.sampled_from(_TRAINERS)),
            rules=draw(st.sampled_from(({}, {"attention": "unfused"}))),
        ),
    )
    space = TrainingSpace(
        num_devices=draw(_some((1, 12, 24, 48))),
        tp=draw(_some((1, 2, 3, 4))),
        pp=draw(_some((1, 2, 3, 4))),
        virtual_stages=draw(_some((1, 2, 3))),
        cp=draw(_some((1, 2, 4))),
        ep=draw(_some((1, 2, 3)) if model.moe else st.sampled_from(((1,), (1, 2)))),
        micro_batch_sizes=draw(_some((1, 2))),
        sequence_parallel=draw(_some((False, True))),
        zero_stages=draw(_some((0, 1, 3))),
        recompute=draw(_some(("none", "selective", "full"))),
        weight_parallel=draw(_some(("", "msp", "fsp", "isp"))),
        weight_degrees=draw(_some((1, 2, 4))),
        overlaps=draw(_some(("none", "data", "all"))),
        pipeline_schedules=draw(_some(_SCHEDULES)),
    )
    return TrainingSearchRequest(scenario=scenario, space=space)


def _sample(space: StrategySpace, draws: list[float]) -> Strategies:
    """Return some points, those included that have what the framework has in no strategy."""
    whole = dataclasses.replace(space, blocks=space.whole)
    places = sorted({int(ratio * whole.num_points) for ratio in draws})
    return whole.piece(0, whole.num_points).take(np.array(places))


_ratios = st.floats(min_value=0, max_value=1, exclude_max=True)
_places = st.lists(_ratios, min_size=20, max_size=20)


@given(request=_requests(), draws=_places)
@settings(max_examples=25, deadline=None)
def test_a_strategy_is_legal_where_the_simulator_finds_nothing_wrong(
    request: TrainingSearchRequest, draws: list[float]
) -> None:
    """And each that is not has a reason in the simulator's words."""
    chosen = _sample(resolve_space(request), draws)
    verdict = judge_legality(chosen)
    reasons = [explain(chosen, row) for row in range(len(chosen))]
    assert [not reason for reason in reasons] == (verdict == LEGAL).tolist()


@given(request=_requests(), draws=_places)
@settings(max_examples=25, deadline=None)
def test_no_legal_strategy_has_a_value_that_was_cut(
    request: TrainingSearchRequest, draws: list[float]
) -> None:
    """But for overlaps that hide the same as another, which is left."""
    space = resolve_space(request)
    chosen = _sample(space, draws)
    legal = chosen.take(judge_legality(chosen) == LEGAL)
    for whole, block in zip(space.whole, space.blocks, strict=True):
        if whole.names != ("overlap",):
            columns = (getattr(legal, name).tolist() for name in whole.names)
            assert set() == set(zip(*columns, strict=True)) - set(block.rows)


@cache
def _small_space(model: ModelArchitecture) -> StrategySpace:
    """Return a space in which every rule finds strategies that others stand for."""
    scenario = TrainingScenario(
        model=model,
        device="h100_sxm",
        topology="h100_dgx",
        global_batch_size=8,
        sequence_length=256,
    )
    space = TrainingSpace(
        num_devices=(1, 2, 4),
        tp=(1, 2),
        pp=(1, 2),
        virtual_stages=(1,),
        cp=(1, 2),
        ep=(1,) if model.moe is None else (1, 2),
        micro_batch_sizes=(1,),
        sequence_parallel=(False, True),
        zero_stages=(0, 1, 3),
        recompute=("none",),
        weight_parallel=("", "msp", "fsp", "isp"),
        weight_degrees=(1, 2),
    )
    return resolve_space(TrainingSearchRequest(scenario=scenario, space=space))


@given(model=st.sampled_from((_LLAMA, _SMALL_MIXTRAL)), ratio=_ratios)
@settings(max_examples=12, deadline=None)
def test_a_redundant_strategy_is_as_good_as_another_of_its_space(
    model: ModelArchitecture, ratio: float
) -> None:
    """It takes and holds exactly what one does that is kept, by the simulator."""
    space = _small_space(model)
    everything = space.piece(0, space.num_points)
    everything = everything.take(judge_legality(everything) == LEGAL)
    is_left_out = np.any(list(find_redundant(everything, space).values()), axis=0)
    rows = np.flatnonzero(is_left_out)
    row = int(rows[int(ratio * len(rows))])
    twins = np.flatnonzero(_twins(everything, row) & ~is_left_out)
    own = _simulate(everything, row)
    assert any(own == _simulate(everything, int(twin)) for twin in twins), everything.name(row)


def _twins(everything: Strategies, row: int) -> np.ndarray:
    """Return what differs from a strategy in nothing but the axes that can be redundant."""
    free = ("sequence_parallel", "weight_parallel", "weight_degree", "zero_stage", "shard_degree")
    fixed = [name for name in AXES if name not in (*free, "overlap")]
    alike = [getattr(everything, name) == getattr(everything, name)[row] for name in fixed]
    return np.asarray(np.all(alike, axis=0))


def _simulate(strategies: Strategies, row: int) -> tuple[float, tuple[float, ...]]:
    report = simulate_training(strategies.scenario(row), RooflinePredictor(), None)
    return report.step_time_ms, tuple(stage.reserved_bytes for stage in report.memory)
