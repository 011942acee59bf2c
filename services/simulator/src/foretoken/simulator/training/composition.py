"""Put the priced operators of all stages together to one step."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from foretoken.domain.lowering import Nodes
from foretoken.simulator.training.operator_prices import OperatorPrices, Price
from foretoken.simulator.training.pipeline import PipelineRun, StageTimes, run_pipeline
from foretoken.simulator.training.schedule import StageOrder
from foretoken.simulator.training.stage_operators import StageOperators

# Which bound of a price a step is composed of.
PriceBound = Callable[[Price], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComposedStep:
    """A step put together at one bound of the prices; times in µs, one per stage."""

    run: PipelineRun
    reduction_ends_us: Sequence[float]
    update_start_us: float
    update_ends_us: Sequence[float]

    @property
    def step_us(self) -> float:
        """Time of the whole step."""
        return max(self.update_ends_us)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """What a stage is busy with during a step, in µs, by operator group and by provenance."""

    by_group: Mapping[str, float]
    by_provenance: Mapping[str, float]

    @property
    def busy_us(self) -> float:
        """Time the stage computes or communicates; the rest of the step it waits."""
        return sum(self.by_group.values())


class StepComposition:
    """The stages of a step with their schedule and prices."""

    def __init__(
        self,
        stages: Sequence[StageOperators],
        orders: Sequence[StageOrder],
        prices: OperatorPrices,
    ) -> None:
        self._stages = stages
        self._orders = orders
        self._prices = prices

    def compose(self, bound: PriceBound) -> ComposedStep:
        """Run the pipeline, then reduce gradients, then update all stages together.

        No stage updates before all have reduced: the norm that gradients are clipped to is that
        of the whole model.
        """
        run = run_pipeline(self._orders, self._stage_times(bound))
        reduced = [
            end + self._sum(stage.reduction, bound)
            for end, stage in zip(run.stage_ends_us, self._stages, strict=True)
        ]
        start = max(reduced)
        return ComposedStep(
            run=run,
            reduction_ends_us=reduced,
            update_start_us=start,
            update_ends_us=[start + self._sum(stage.update, bound) for stage in self._stages],
        )

    def split_work(self, run: PipelineRun) -> list[StageWork]:
        """Return what each stage does in a step whose pipeline ran like `run`."""
        return [
            self._split_stage(index, transfer_us)
            for index, transfer_us in enumerate(run.transfers_us)
        ]

    def _split_stage(self, index: int, transfer_us: float) -> StageWork:
        stage = self._stages[index]
        num_micro_batches = len(self._orders[index]) // 2
        repeated = [*stage.forward, *stage.recompute, *stage.backward]
        by_group: defaultdict[str, float] = defaultdict(float)
        by_provenance: defaultdict[str, float] = defaultdict(float)
        for nodes, count in (
            (repeated, num_micro_batches),
            ([*stage.reduction, *stage.update], 1),
        ):
            for node in nodes:
                price = self._prices.find(node)
                time_us = price.latency_us * node.repeat * count
                by_group[node.group] += time_us
                by_provenance[price.provenance.name.lower()] += time_us
        sends = [node for other in self._stages for node in other.sends]
        if sends:
            # Transfers between stages are all alike, so any of them says what they rest on.
            by_group["stage_transfer"] = transfer_us
            by_provenance[self._prices.find(sends[0]).provenance.name.lower()] += transfer_us
        return StageWork(by_group=by_group, by_provenance=by_provenance)

    def _stage_times(self, bound: PriceBound) -> list[StageTimes]:
        sends = [self._sum(stage.sends, bound) for stage in self._stages]
        return [
            StageTimes(
                forward_us=self._sum(stage.forward, bound),
                backward_us=self._sum((*stage.recompute, *stage.backward), bound),
                send_forward_us=sends[index],
                send_backward_us=sends[index - 1] if index > 0 else 0.0,
            )
            for index, stage in enumerate(self._stages)
        ]

    def _sum(self, nodes: Nodes, bound: PriceBound) -> float:
        return sum((bound(self._prices.find(node)) * node.repeat for node in nodes), 0.0)
