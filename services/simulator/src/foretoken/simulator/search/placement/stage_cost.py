"""What stages cost on every kind of node, as lines over their number of layers.

Two short pipelines of three stages are lowered and priced, with two and with three layers a stage:
their difference is a layer, the rest is what the first stage, those between, and the last have
beside. Layers are taken to be alike; where they repeat after a period, a layer is the mean of one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.communication import PlacedGroup
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.graph import OperatorNode, Overlap
from foretoken.domain.lowering import Nodes
from foretoken.domain.scenario import TrainingScenario
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.search.placement.cluster import NodeKind
from foretoken.simulator.search.placement.strategy import (
    StageWork,
    layer_period,
    with_alike_layers,
)
from foretoken.simulator.training.composition import ComposedStep, StepComposition, StepRules
from foretoken.simulator.training.operator_prices import OperatorPrices, fetch_prices
from foretoken.simulator.training.scenario_checks import check_chunks, check_scenario
from foretoken.simulator.training.schedule import RankOrder, find_schedule, order_step
from foretoken.simulator.training.stage_operators import StepOperators, lower_step
from foretoken.simulator.training.variability import Spread, StepColumns

Numbers = NDArray[np.float64]

_NUM_STAGES = 3
_NUM_MICRO_BATCHES = 4
# Samples of one line: two numbers of layers.
_NUM_BOTH = 2
# The estimate and both bounds of the predictor's interval.
NUM_BOUNDS = 3

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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageLines:
    """Costs of stages in µs: `constants` and `per_layer` are (position, measure, bound).

    Positions are the first stage, one between, the last, and, where it was asked for, the only one.
    `near_us` and `across_us` are what a stage sends inside a node and to another, `back` the same
    of gradients: (bound).
    """

    constants: Numbers
    per_layer: Numbers
    near_us: Numbers
    across_us: Numbers
    near_back_us: Numbers
    across_back_us: Numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """A short pipeline on one kind of node."""

    scenario: TrainingScenario
    operators: StepOperators
    orders: Sequence[RankOrder]
    sends: tuple[tuple[Nodes, Nodes], tuple[Nodes, Nodes]]

    @property
    def nodes(self) -> Iterator[OperatorNode]:
        yield from self.operators.all_nodes
        for near, across in self.sends:
            yield from (*near, *across)


def measure_lines(
    kind: NodeKind,
    works: Mapping[StageWork, bool],
    scenario: TrainingScenario,
    predictor: LatencySource,
) -> tuple[dict[StageWork, StageLines], dict[StageWork, InvalidRequestError], str]:
    """Return what stages cost on a kind of node, in one question to the predictor.

    `works` says of each whether it also has the whole model on one stage.

    Beside it why stages cannot work so, and the version of the predictor's model.
    """
    on_kind = replace(scenario, device=kind.device, topology=kind.topology)
    period = layer_period(scenario.model)
    counts = (2, 3) if period == 1 else (period, 2 * period)
    samples: dict[StageWork, list[_Sample]] = {}
    refused: dict[StageWork, InvalidRequestError] = {}
    for work, is_alone in works.items():
        depths = (_NUM_STAGES, 1) if is_alone else (_NUM_STAGES,)
        try:
            samples[work] = [
                _lower(work, on_kind, depth, count) for depth in depths for count in counts
            ]
        except InvalidRequestError as err:
            refused[work] = err
    nodes = (node for own in samples.values() for sample in own for node in sample.nodes)
    prices = fetch_prices(nodes, on_kind, predictor)
    lines = {work: _fit(own, counts, prices) for work, own in samples.items()}
    return lines, refused, prices.model_version


def _lower(
    work: StageWork, scenario: TrainingScenario, num_stages: int, num_layers: int
) -> _Sample:
    """Return a short pipeline of so many stages with so many layers each.

    Raises:
        InvalidRequestError: stages cannot work so.

    """
    layout = replace(scenario.layout, pp=num_stages)
    model = with_alike_layers(scenario.model)
    model = replace(model, num_layers=num_stages * num_layers)
    sample = work.apply(replace(scenario, layout=layout, model=model, stage_layers=()))
    batch = work.dp * work.micro_batch_size * _NUM_MICRO_BATCHES
    sample = replace(sample, global_batch_size=batch, virtual_stages=1)
    schedule = find_schedule(work.pipeline_schedule)
    check_scenario(sample, schedule)
    ranks = chunk_ranks(sample)
    check_chunks(ranks, sample)
    orders = order_step(sample, schedule)
    operators = lower_step(sample, sample.trainer.resolve(), ranks, orders)
    chunk = operators.chunks[num_stages // 2]
    near = {"devices_per_node": 2, "num_nodes": 1}
    far = PlacedGroup.of_nodes("pp", chunk.rank)
    sends = tuple(
        (
            tuple(replace(n, dims={**n.dims, **near}, num_sharing=1) for n in nodes),
            tuple(
                replace(n, dims={**n.dims, **far.dims}, num_sharing=far.num_sharing) for n in nodes
            ),
        )
        for nodes in (chunk.sends, chunk.sends_back)
    )
    return _Sample(scenario=sample, operators=operators, orders=orders, sends=(sends[0], sends[1]))


def _fit(samples: Sequence[_Sample], counts: tuple[int, int], prices: OperatorPrices) -> StageLines:
    measured = [_measure(sample, prices) for sample in samples]
    per_layer = (measured[1] - measured[0]) / (counts[1] - counts[0])
    constants = measured[0] - counts[0] * per_layer
    if len(measured) > _NUM_BOTH:
        alone = (measured[3] - measured[2]) / (counts[1] - counts[0])
        per_layer = np.concatenate([per_layer, alone])
        constants = np.concatenate([constants, measured[2] - counts[0] * alone])
    columns = StepColumns.of_answer(Spread(), 0)
    sent = [
        sum((columns.price(prices.find(node)) for node in nodes), columns.constant(0))[:NUM_BOUNDS]
        for pair in samples[0].sends
        for nodes in pair
    ]
    return StageLines(
        constants=constants,
        per_layer=per_layer,
        near_us=sent[0],
        across_us=sent[1],
        near_back_us=sent[2],
        across_back_us=sent[3],
    )


def _measure(sample: _Sample, prices: OperatorPrices) -> Numbers:
    """Return the measures of every stage: (position, measure, bound)."""
    schedule = find_schedule(sample.scenario.pipeline_schedule)
    rules = StepRules.of_scenario(sample.scenario, schedule, sample.orders)
    composition = StepComposition(sample.operators, prices, rules)
    composed = composition.compose(StepColumns.of_answer(Spread(), 0))
    return np.stack(
        [_measure_stage(stage, sample, composed) for stage in range(len(sample.orders))]
    )


def _measure_stage(stage: int, sample: _Sample, composed: ComposedStep) -> Numbers:
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
    return np.stack([found[name][:NUM_BOUNDS] for name in MEASURES])
