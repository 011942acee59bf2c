"""What stages cost on every kind of node, as lines over their number of layers of each kind."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.lowering.graph import OperatorNode, Overlap
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.grid import Floats
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.placement.cluster import NodeKind
from foretoken.simulator.search.placement.layer_kind import FIRST_KIND, list_layer_kinds
from foretoken.simulator.search.placement.sample import (
    NUM_SAMPLE_STAGES,
    SAMPLE_LAYERS,
    Sample,
    Samples,
)
from foretoken.simulator.search.placement.strategy import (
    PlacedStrategy,
    PlacementSpace,
    StageWork,
)
from foretoken.simulator.training.composition import ComposedStep, StepComposition, StepRules
from foretoken.simulator.training.operator_prices import OperatorPrices, fetch_prices
from foretoken.simulator.training.schedule import find_schedule
from foretoken.simulator.training.variability import Spread, StepColumns

# Where a stage is; the only one is measured where it is asked for.
FIRST, BETWEEN, LAST, ONLY = range(4)

MEASURES = (
    "forward",
    "backward_input",
    "backward_weight",
    "not_accumulated",
    "slowdown",
    "exposed",
    "reduction",
    "deferred",
    "buckets",
    "check",
    "update",
    "gather",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceCases:
    """The cases that stages are timed in: the first `num_cases` of `columns`.

    `mark` is given the prices on a kind of node, by its number, before they are put into columns.
    """

    columns: StepColumns
    num_cases: int
    mark: Callable[[OperatorPrices, int], OperatorPrices]


# The estimate and both bounds of the predictor's interval.
BOUNDS = PriceCases(
    columns=StepColumns.of_answer(Spread(), 0), num_cases=3, mark=lambda prices, _: prices
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageLines:
    """Costs of stages in µs: `constants` are (position, measure, case).

    `per_layer` are (position, kind of layer, measure, case). Positions are the first stage, one
    between, the last, and, where it was asked for, the only one. `near_us` and `across_us` are what
    a stage sends inside a node and to another, `back` the same of gradients: (case).
    """

    constants: Floats
    per_layer: Floats
    near_us: Floats
    across_us: Floats
    near_back_us: Floats
    across_back_us: Floats


@dataclass(frozen=True, slots=True)
class _WorkSamples:
    """Pipelines of three stages, of one, and both again of the layers that a model begins with."""

    whole: Sequence[Sample]
    alone: Sequence[Sample]
    first_whole: Sequence[Sample]
    first_alone: Sequence[Sample]

    @property
    def nodes(self) -> Iterator[OperatorNode]:
        for samples in (self.whole, self.alone, self.first_whole, self.first_alone):
            for sample in samples:
                yield from sample.nodes


class StageMeter:
    """Prices the samples of a scenario."""

    def __init__(self, scenario: TrainingScenario, samples: Samples, cases: PriceCases) -> None:
        """Take samples, which other predictors may be asked about too."""
        self._scenario, self._samples, self._cases = scenario, samples, cases
        self._has_first = FIRST_KIND in list_layer_kinds(scenario.model)

    def measure(
        self, number: int, kind: NodeKind, works: Mapping[StageWork, bool], predictor: LatencySource
    ) -> tuple[dict[StageWork, StageLines], dict[StageWork, InvalidRequestError], str]:
        """Return what stages cost on a kind of node, in one question to the predictor.

        `works` says of each whether it also has the whole model on one stage; `number` is that of
        the kind.

        With it why stages cannot work so, and the version of the predictor's model.
        """
        samples: dict[StageWork, _WorkSamples] = {}
        refused: dict[StageWork, InvalidRequestError] = {}
        for work, is_alone in works.items():
            try:
                samples[work] = self._find(work, kind, is_alone=is_alone)
            except InvalidRequestError as err:
                refused[work] = err
        nodes = (node for own in samples.values() for node in own.nodes)
        on_kind = replace(self._scenario, device=kind.device, topology=kind.topology)
        prices = fetch_prices(nodes, on_kind, predictor)
        marked = self._cases.mark(prices, number)
        lines = {work: _fit(own, marked, self._cases) for work, own in samples.items()}
        return lines, refused, prices.model_version

    def _find(self, work: StageWork, kind: NodeKind, *, is_alone: bool) -> _WorkSamples:
        def find(num_stages: int, *, is_first: bool) -> list[Sample]:
            return self._samples.find(work, kind, num_stages, is_first=is_first)

        has_first = self._has_first
        return _WorkSamples(
            whole=find(NUM_SAMPLE_STAGES, is_first=False),
            alone=find(1, is_first=False) if is_alone else (),
            first_whole=find(NUM_SAMPLE_STAGES, is_first=True) if has_first else (),
            first_alone=find(1, is_first=True) if is_alone and has_first else (),
        )


def _fit(samples: _WorkSamples, prices: OperatorPrices, cases: PriceCases) -> StageLines:
    constants, per_layer = _fit_line(samples.whole, prices, cases)
    first = _fit_line(samples.first_whole, prices, cases)[1] if samples.first_whole else per_layer
    by_kind = np.stack([first, per_layer], axis=1)
    if samples.alone:
        own_constants, own = _fit_line(samples.alone, prices, cases)
        own_first = _fit_line(samples.first_alone, prices, cases)[1] if samples.first_alone else own
        constants = np.concatenate([constants, own_constants])
        by_kind = np.concatenate([by_kind, np.stack([own_first, own], axis=1)])
    columns = cases.columns
    sent = [
        sum((columns.price(prices.find(node)) for node in nodes), columns.constant(0))[
            : cases.num_cases
        ]
        for pair in samples.whole[0].sends
        for nodes in pair
    ]
    return StageLines(
        constants=constants,
        per_layer=by_kind,
        near_us=sent[0],
        near_back_us=sent[1],
        across_us=sent[2],
        across_back_us=sent[3],
    )


def _fit_line(
    samples: Sequence[Sample], prices: OperatorPrices, cases: PriceCases
) -> tuple[Floats, Floats]:
    """Return what stages have besides layers, and of each layer: (position, measure, case)."""
    few, many = (_measure(sample, prices, cases) for sample in samples)
    per_layer = (many - few) / (SAMPLE_LAYERS[1] - SAMPLE_LAYERS[0])
    return few - SAMPLE_LAYERS[0] * per_layer, per_layer


def _measure(sample: Sample, prices: OperatorPrices, cases: PriceCases) -> Floats:
    """Return the measures of every stage: (position, measure, case)."""
    schedule = find_schedule(sample.scenario.pipeline_schedule)
    rules = StepRules.of_scenario(sample.scenario, schedule, sample.orders)
    composition = StepComposition(sample.operators, prices, rules)
    composed = composition.compose(cases.columns)
    measured = np.stack(
        [_measure_stage(stage, sample, composed) for stage in range(len(sample.orders))]
    )
    return measured[..., : cases.num_cases]


def _measure_stage(stage: int, sample: Sample, composed: ComposedStep) -> Floats:
    passes, end = composed.passes[stage], composed.end.ranks[stage]
    duration = composed.timing.duration(stage)
    none = composed.timing.columns.constant(0)
    reduction = sample.operators.chunks[stage].states.reduction
    deferred = [node for node in reduction if node.overlap is Overlap.DEFERRED]
    waited = [node for node in reduction if node.overlap is not Overlap.DEFERRED]
    inputs, weights = passes.backward_input or passes.backward, passes.backward_weight
    exposed = [
        time_us
        for item in (passes.forward, inputs, weights)
        if item is not None
        for time_us in item.exposed_us.values()
    ]
    found = {
        "forward": passes.forward.total_us,
        "backward_input": inputs.total_us,
        "backward_weight": none if weights is None else weights.total_us,
        "not_accumulated": passes.not_accumulated_us,
        "slowdown": passes.reduction_slowdown_us,
        "exposed": sum(exposed, none),
        "reduction": sum((duration(node) * node.repeat for node in waited), none),
        "deferred": sum((duration(node) * node.repeat for node in deferred), none),
        "buckets": none + sum(node.repeat for node in deferred),
        "check": end.check_us,
        "update": end.update_us,
        "gather": end.exposed_gather_us,
    }
    return np.stack([found[name] for name in MEASURES])


class StagePrices:
    """The lines of all stages of a search, each kind of node in one question to a predictor."""

    def __init__(
        self,
        space: PlacementSpace,
        samples: Samples,
        predictor: LatencySource,
        cases: PriceCases = BOUNDS,
    ) -> None:
        """Take what is priced, and the cases it is priced in."""
        self._space, self._predictor = space, predictor
        self._meter = StageMeter(space.scenario, samples, cases)
        self.num_cases = cases.num_cases
        self._lines: list[dict[StageWork, StageLines]] = []
        self._refused: list[dict[StageWork, InvalidRequestError]] = []
        self._versions: list[str] = []

    @property
    def num_shapes(self) -> int:
        """Kinds of work on kinds of nodes that were priced."""
        return sum(len(lines) for lines in self._lines)

    @property
    def model_version(self) -> str:
        """The versions of the predictor's models."""
        return ", ".join(dict.fromkeys(filter(None, self._versions)))

    def measure(self, points: Sequence[PlacedStrategy]) -> None:
        """Lower and price what the stages of strategies do on every kind of node."""
        for kind, nodes in enumerate(self._space.kinds):
            lines, refused, version = self._meter.measure(
                kind, nodes, _works_on(kind, points), self._predictor
            )
            self._lines.append(lines)
            self._refused.append(refused)
            self._versions.append(version)

    def lines_of(self, work: StageWork) -> list[StageLines | None]:
        """Return the lines of a work on each kind of node; none where nothing works so."""
        return [lines.get(work) for lines in self._lines]

    def error_of(self, point: PlacedStrategy) -> InvalidRequestError | None:
        """Return why the stages of a strategy cannot work so, if they cannot."""
        errors = (self._refused[kind].get(point.work) for kind in set(point.pipeline.stages))
        return next((error for error in errors if error is not None), None)


def _works_on(kind: int, points: Sequence[PlacedStrategy]) -> Mapping[StageWork, bool]:
    """Return the works of a kind of node, and whether each also has the model on one stage."""
    works: dict[StageWork, bool] = {}
    for point in points:
        if kind in point.pipeline.stages:
            is_alone = len(point.pipeline.stages) == 1
            works[point.work] = works.get(point.work, False) or is_alone
    return works
