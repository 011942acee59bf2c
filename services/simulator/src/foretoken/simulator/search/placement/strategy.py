"""The strategies of a mixed cluster: a pipeline of stages, and how each of them works."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_search import TrainingSearchRequest, TrainingSpace
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.search.placement.cluster import (
    NodeKind,
    Pipeline,
    list_kinds,
    list_pipelines,
)
from foretoken.simulator.search.training.trainer_bounds import list_bounds
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.training.scenario_checks import check_chunks, check_scenario

PLAIN_SCHEDULE, _SPLIT, INTERLEAVED = "one_f_one_b", "zero_bubble_h1", "interleaved"
_MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """What decides what a stage does for a micro batch, and how it updates."""

    tp: int
    cp: int
    dp: int
    micro_batch_size: int
    zero_stage: int
    recompute: str
    sequence_parallel: bool
    splits_backward: bool

    def apply(self, scenario: TrainingScenario) -> TrainingScenario:
        """Return a scenario whose stages work so, of as many stages as it had.

        Its schedule is a plain one, with whole backward passes or split ones.
        """
        layout = scenario.layout
        return replace(
            scenario,
            layout=ParallelLayout(tp=self.tp, cp=self.cp, dp=self.dp, pp=layout.pp, ep=layout.ep),
            micro_batch_size=self.micro_batch_size,
            zero_stage=self.zero_stage,
            recompute=self.recompute,
            recompute_modules=(scenario.recompute_modules if self.recompute == "selective" else ()),
            sequence_parallel=self.sequence_parallel,
            pipeline_schedule=_SPLIT if self.splits_backward else PLAIN_SCHEDULE,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedStrategy:
    """A strategy before its layers are cut: what its stages do, and where they are.

    A stage has `virtual_stages` chunks of layers, between which the pipeline goes round all stages.
    """

    pipeline: Pipeline
    work: StageWork
    global_batch_size: int
    schedule: str
    virtual_stages: int

    @property
    def num_micro_batches(self) -> int:
        """Micro batches of a step."""
        return self.global_batch_size // (self.work.dp * self.work.micro_batch_size)


class PlacementSpace:
    """All strategies of a request's cluster."""

    def __init__(self, request: TrainingSearchRequest) -> None:
        """Resolve a request's space.

        Raises:
            UnknownDeviceError, UnknownTopologyError: no such name.
            UnknownPluginError: no such trainer or framework.
            InvalidRequestError: kinds of nodes that cannot be used.

        """
        self.scenario = request.scenario
        self.space = request.space
        self.bounds = list_bounds(request)
        self.kinds: tuple[NodeKind, ...] = list_kinds(request.space)
        self.pipelines, self.num_orders_left = list_pipelines(
            self.kinds,
            has_subsets=request.space.has_subsets,
            max_stages=request.scenario.model.num_layers,
        )

    @cached_property
    def num_points(self) -> int:
        """Points of the space, those included that cannot run."""
        return sum(1 for _ in self.strategies())

    def strategies(self) -> Iterator[PlacedStrategy]:
        """Yield every strategy, the batch divided or not."""
        for pipeline in self.pipelines:
            if self.space.pp and len(pipeline.stages) not in self.space.pp:
                continue
            ways = self._list_ways(len(pipeline.stages))
            for work, (schedule, chunks) in product(self._works(pipeline), ways):
                plug_in = find_schedule(schedule)
                for size in self.space.global_batch_sizes or (self.scenario.global_batch_size,):
                    yield PlacedStrategy(
                        pipeline=pipeline,
                        work=replace(work, splits_backward=plug_in.splits_backward),
                        global_batch_size=size,
                        schedule=schedule,
                        virtual_stages=chunks,
                    )

    @cached_property
    def schedules(self) -> tuple[str, ...]:
        """Names of the schedules that are tried."""
        asked = self.space.pipeline_schedules or (self.scenario.pipeline_schedule, INTERLEAVED)
        return tuple(dict.fromkeys(asked))

    def _list_ways(self, num_stages: int) -> tuple[tuple[str, int], ...]:
        """Return the schedules, each with a number of chunks per stage that it is tried with."""
        given = self.space.virtual_stages
        chunks = given or equal_round_counts(self.scenario.model.num_layers, num_stages)
        found: list[tuple[str, int]] = []
        for name in self.schedules:
            needed = find_schedule(name).virtual_stages
            if needed == 1:
                found += [(name, 1)] if 1 in chunks else []
            elif needed:
                found.append((name, needed))
            else:
                # One interleaved chunk is what a plain schedule does.
                is_alone = len(self.schedules) == 1
                found += [(name, count) for count in chunks if count > 1 or is_alone]
        return tuple(dict.fromkeys(found))

    def _works(self, pipeline: Pipeline) -> Iterator[StageWork]:
        space, scenario = self.space, self.scenario
        degrees = [
            (tp, cp)
            for tp in space.tp or _powers(self._smallest_node(pipeline))
            for cp in space.cp or (scenario.layout.cp,)
            if pipeline.stage_size % (tp * cp) == 0
        ]
        for (tp, cp), size, zero, recompute, splits in product(
            degrees,
            space.micro_batch_sizes or _MICRO_BATCHES,
            space.zero_stages or (scenario.zero_stage,),
            space.recompute or (scenario.recompute,),
            space.sequence_parallel or (scenario.sequence_parallel,),
        ):
            yield StageWork(
                tp=tp,
                cp=cp,
                dp=pipeline.stage_size // (tp * cp),
                micro_batch_size=size,
                zero_stage=zero,
                recompute=recompute,
                sequence_parallel=splits and tp > 1,
                splits_backward=False,
            )

    def _smallest_node(self, pipeline: Pipeline) -> int:
        return min(self.kinds[kind].devices_per_node for kind in set(pipeline.stages))

    def scenario_of(
        self, strategy: PlacedStrategy, stage_layers: Sequence[int]
    ) -> TrainingScenario:
        """Return exactly what the event simulator is asked about a strategy.

        `stage_layers` are those of every chunk, in the order of the model, or none.
        """
        stages = [self.kinds[kind] for kind in strategy.pipeline.stages]
        layout = replace(self.scenario.layout, pp=len(stages))
        return replace(
            strategy.work.apply(replace(self.scenario, layout=layout)),
            device=stages[0].device,
            topology=stages[0].topology,
            stage_devices=tuple(kind.device for kind in stages),
            stage_topologies=tuple(kind.topology for kind in stages),
            stage_layers=tuple(stage_layers),
            pipeline_schedule=strategy.schedule,
            virtual_stages=strategy.virtual_stages,
            global_batch_size=strategy.global_batch_size,
        )

    def check(self, work: StageWork, kind: NodeKind) -> None:
        """Check that a stage of a kind of node can work so, whatever its pipeline.

        Raises:
            InvalidRequestError: it cannot.

        """
        alone = replace(
            self.scenario,
            device=kind.device,
            topology=kind.topology,
            layout=replace(self.scenario.layout, pp=1),
            stage_layers=(),
            virtual_stages=1,
            global_batch_size=work.dp * work.micro_batch_size,
        )
        stage = work.apply(alone)
        check_scenario(stage)
        check_chunks(chunk_ranks(stage), stage)

    def usd_per_hour(self, pipeline: Pipeline) -> float:
        """Return what an hour of all the nodes of a pipeline costs; 0 where a kind has no price."""
        prices = [
            (self.kinds[kind].usd_per_hour, count * self.kinds[kind].devices_per_node)
            for kind, count in enumerate(pipeline.nodes)
            if count
        ]
        if any(price == 0 for price, _ in prices):
            return 0.0
        return sum(price * count for price, count in prices)


def describe_stages(pipeline: Pipeline, kinds: Sequence[NodeKind]) -> str:
    """Return the devices of the stages in order: `4 x a100_sxm_80,2 x a40`."""
    return ",".join(f"{count} x {kinds[kind].device}" for kind, count in pipeline.runs)


def describe_nodes(pipeline: Pipeline, kinds: Sequence[NodeKind]) -> str:
    """Return the nodes of a pipeline: `4 a100_sxm_80 + 8 a40`."""
    counts = zip(pipeline.nodes, kinds, strict=True)
    return " + ".join(f"{count} {kind.device}" for count, kind in counts if count)


def name_strategy(strategy: PlacedStrategy, space: PlacementSpace) -> str:
    """Return a name that no other strategy of the space has."""
    work, asked = strategy.work, space.space
    parts = [
        f"tp{work.tp} pp{len(strategy.pipeline.stages)}",
        f"vpp{strategy.virtual_stages}" if strategy.virtual_stages > 1 else "",
        f"dp{work.dp}",
        f"cp{work.cp}" if work.cp > 1 else "",
        f"mbs{work.micro_batch_size}",
        "sp" if work.sequence_parallel else "",
        f"zero{work.zero_stage}" if len(asked.zero_stages) > 1 else "",
        f"recompute {work.recompute}" if len(asked.recompute) > 1 else "",
        strategy.schedule if len(asked.pipeline_schedules) > 1 else "",
        f"gbs{strategy.global_batch_size}" if len(asked.global_batch_sizes) > 1 else "",
    ]
    stages = describe_stages(strategy.pipeline, space.kinds)
    return f"{' '.join(part for part in parts if part)} on {stages}"


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def fixed_axes(space: TrainingSpace, scenario: TrainingScenario) -> tuple[str, ...]:
    """Return what a search over a mixed cluster does not vary although a space lists it."""
    asked = {
        "devices": space.devices,
        "num_devices": space.num_devices,
        "ep": tuple(value for value in space.ep if value != scenario.layout.ep),
        "overlaps": space.overlaps,
        "weight_parallel": tuple(
            value for value in space.weight_parallel if value != scenario.weight_parallel
        ),
    }
    return tuple(name for name, values in asked.items() if values)


def equal_round_counts(num_layers: int, num_stages: int) -> list[int]:
    """Return how often a pipeline can go round its stages, each with a layer every time."""
    most = num_layers // num_stages if num_stages > 1 else 1
    return [count for count in range(1, most + 1) if count == 1 or num_layers % count == 0]
