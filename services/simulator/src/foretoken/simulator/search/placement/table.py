"""The strategies of a mixed cluster as the table of a report, and which of them are best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.hardware.device import find_device
from foretoken.domain.training_search import SpaceCell, StrategyColumns
from foretoken.domain.units import S_PER_HOUR, US_PER_MS, US_PER_S
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.search.pareto import pareto_front
from foretoken.simulator.search.placement.strategy import describe_nodes, describe_stages
from foretoken.simulator.search.placement.survey import (
    CutStrategy,
    PlacementAnswers,
    name_strategy,
)
from foretoken.simulator.search.training.ranking import Ranking, rank_values
from foretoken.simulator.training.efficiency import count_step_flops

_BILLION = 1e9
_CELL_AXES = (("tp", "pp"), ("micro_batch_size", "recompute"))


@dataclass(frozen=True)
class PlacementFigures:
    """Figures of all strategies that fit, one entry each, in the order of the answers."""

    answers: PlacementAnswers

    @cached_property
    def samples(self) -> Floats:
        """Samples of a step."""
        return self._of(lambda item: item.strategy.global_batch_size)

    @cached_property
    def num_devices(self) -> Floats:
        """Devices of the pipeline."""
        return self._of(lambda item: item.strategy.pipeline.num_devices)

    @cached_property
    def usd_per_hour(self) -> Floats:
        """What an hour of all devices costs; 0 where one has no price."""
        space = self.answers.space
        return self._of(lambda item: space.usd_per_hour(item.strategy.pipeline))

    @cached_property
    def step_s(self) -> Floats:
        """Time of a step."""
        found: Floats = self.answers.step_us[:, 0] / US_PER_S
        return found

    @cached_property
    def tokens_per_s(self) -> Floats:
        """Tokens per second of all devices."""
        return self.samples * self.answers.space.scenario.sequence_length / self.step_s

    @cached_property
    def usd_per_step(self) -> Floats:
        """What a step costs."""
        return self.usd_per_hour * self.step_s / S_PER_HOUR

    @cached_property
    def usd_per_billion_tokens(self) -> Floats:
        """What a billion tokens cost."""
        tokens = self.samples * self.answers.space.scenario.sequence_length
        return self.usd_per_step / tokens * _BILLION

    @cached_property
    def margin_bytes(self) -> Floats:
        """Free memory of the fullest device."""
        return self._of(lambda item: item.margin_bytes)

    @cached_property
    def mfu_ratio(self) -> Floats:
        """Share of the peak of every device."""
        space = self.answers.space
        per_sample = _flops_per_sample(self.answers)
        peaks = [find_device(kind.device).peak_flops(space.scenario.dtype) for kind in space.kinds]
        peak = self._of(
            lambda item: (
                item.strategy.pipeline.stage_size
                * sum(peaks[kind] for kind in item.strategy.pipeline.stages)
            )
        )
        return per_sample * self.samples / (peak * self.step_s)

    @cached_property
    def shapes(self) -> Ints:
        """Equal where stages run the same operators on the same kinds of node."""
        codes: dict[object, int] = {}
        found = [
            codes.setdefault(
                (
                    item.strategy.work.tp,
                    item.strategy.work.cp,
                    item.strategy.work.micro_batch_size,
                    item.strategy.work.sequence_parallel,
                    frozenset(item.strategy.pipeline.stages),
                ),
                len(codes),
            )
            for item in self.answers.strategies
        ]
        return np.array(found, dtype=np.int64)

    def rank(self, objective: str) -> Ranking:
        """Return the order by one of `TRAINING_OBJECTIVES`; equal ones go by the step."""
        if objective == "memory_headroom":
            values = np.stack([-self.margin_bytes] * 3)
        else:
            factors = {
                "step_time": np.ones(len(self.samples)),
                "throughput_per_gpu": self.num_devices / self.samples,
                "cost": self.usd_per_hour / self.samples,
            }
            values = (self.answers.step_us * factors[objective][:, None]).T
        return rank_values(values, self.shapes, self.answers.step_us[:, 0])

    def _of(self, value: Callable[[CutStrategy], float]) -> Floats:
        return np.array([value(item) for item in self.answers.strategies], dtype=np.float64)


def _flops_per_sample(answers: PlacementAnswers) -> float:
    scenario = answers.space.scenario
    return count_step_flops(replace(scenario, micro_batch_size=1, global_batch_size=1))


def build_table(figures: PlacementFigures, rows: Ints, ranks: Ints) -> StrategyColumns:
    """Return the candidates of these rows, in their order, with their ranks."""
    answers = figures.answers
    space, strategies = answers.space, [answers.strategies[row] for row in rows]
    works = [item.strategy.work for item in strategies]
    pipelines = [item.strategy.pipeline for item in strategies]
    everywhere = np.ones(len(answers.strategies), dtype=np.bool_)
    is_priced = figures.usd_per_hour > 0
    on_cost = pareto_front(figures.tokens_per_s, figures.usd_per_billion_tokens, is_priced)
    per_gpu = figures.tokens_per_s / figures.num_devices
    on_memory = pareto_front(per_gpu, -figures.margin_bytes, everywhere)
    step_ms = answers.step_us[rows] / US_PER_MS
    return StrategyColumns(
        name=_texts([name_strategy(item.strategy, space) for item in strategies]),
        device=_texts([describe_nodes(pipeline, space.kinds) for pipeline in pipelines]),
        num_devices=figures.num_devices[rows].astype(np.int64),
        tp=np.array([work.tp for work in works]),
        pp=np.array([len(pipeline.stages) for pipeline in pipelines]),
        virtual_stages=np.ones(len(rows), dtype=np.int64),
        dp=np.array([work.dp for work in works]),
        cp=np.array([work.cp for work in works]),
        ep=np.full(len(rows), space.scenario.layout.ep),
        micro_batch_size=np.array([work.micro_batch_size for work in works]),
        num_micro_batches=np.array([item.strategy.num_micro_batches for item in strategies]),
        global_batch_size=np.array([item.strategy.global_batch_size for item in strategies]),
        sequence_parallel=np.array([work.sequence_parallel for work in works]),
        zero_stage=np.array([work.zero_stage for work in works]),
        shard_degree=np.full(len(rows), space.scenario.shard_degree),
        overlap=_texts([""] * len(rows)),
        recompute=_texts([work.recompute for work in works]),
        weight_parallel=_texts([space.scenario.weight_parallel] * len(rows)),
        weight_degree=np.full(len(rows), space.scenario.weight_degree),
        pipeline_schedule=_texts([work.pipeline_schedule for work in works]),
        placement=_texts([describe_stages(pipeline, space.kinds) for pipeline in pipelines]),
        stage_layers=_texts([",".join(map(str, item.stage_layers)) for item in strategies]),
        step_time_ms=step_ms[:, 0],
        step_time_low_ms=step_ms[:, 1],
        step_time_high_ms=step_ms[:, 2],
        tokens_per_s=figures.tokens_per_s[rows],
        tokens_per_s_per_gpu=per_gpu[rows],
        mfu_ratio=figures.mfu_ratio[rows],
        bubble_ratio=answers.bubble_ratio[rows],
        exposed_communication_ratio=answers.exposed_ratio[rows],
        reserved_bytes=np.array([item.reserved_bytes for item in strategies]),
        margin_bytes=figures.margin_bytes[rows],
        usd_per_step=figures.usd_per_step[rows],
        usd_per_billion_tokens=figures.usd_per_billion_tokens[rows],
        rank=ranks,
        is_pareto_cost=on_cost[rows],
        is_pareto_memory=on_memory[rows],
    )


def _texts(words: Sequence[str]) -> NDArray[np.object_]:
    return np.array(words, dtype=object)


def list_cells(figures: PlacementFigures) -> tuple[SpaceCell, ...]:
    """Return how many strategies fit where two axes meet, and the best there."""
    answers, per_gpu = figures.answers, figures.tokens_per_s / figures.num_devices
    found = []
    for row_axis, column_axis in _CELL_AXES:
        keyed = sorted(
            (_axis(answers, place, row_axis), _axis(answers, place, column_axis), place)
            for place in range(len(answers.strategies))
        )
        for (row, column), same in groupby(keyed, key=lambda item: item[:2]):
            places = [place for _, _, place in same]
            best = max(places, key=lambda place: per_gpu[place])
            found.append(
                SpaceCell(
                    row_axis=row_axis,
                    column_axis=column_axis,
                    row=str(row),
                    column=str(column),
                    num_legal=len(places),
                    num_fitting=len(places),
                    best=name_strategy(answers.strategies[best].strategy, answers.space),
                    tokens_per_s_per_gpu=float(per_gpu[best]),
                )
            )
    return tuple(found)


def _axis(answers: PlacementAnswers, place: int, name: str) -> int | str:
    strategy = answers.strategies[place].strategy
    if name == "pp":
        return len(strategy.pipeline.stages)
    value: int | str = getattr(strategy.work, name)
    return value
