"""Say why an estimate is what it is: the device's limits, the models' parts, what was measured.

How much a feature moves an answer is its Shapley value, by sampled orders: trees with linear leaves
have no closed form for it in LightGBM, and what answers may change.
Source: Strumbelj and Kononenko, Explaining prediction models and individual predictions, 2014.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import (
    Contribution,
    Explanation,
    LatencyQuery,
    LatencyReply,
    MeasuredNeighbour,
    MemberAnswer,
    OperatorTable,
    pick_estimate,
)
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.features import Design, Matrix, build_design, feature_names
from foretoken.predictor.intervals.coverage import Tier
from foretoken.predictor.model_set import ModelSet, Wanted
from foretoken.predictor.query_columns import find_target, read_columns
from foretoken.predictor.regression.member import Members, tree_inputs
from foretoken.predictor.regression.series_regressor import SeriesRegressor
from foretoken.predictor.roofline import Columns, FloatColumn, compute_limits
from foretoken.predictor.series import Series
from foretoken.predictor.source import find_source, target_inside_node, target_linked_alike
from foretoken.predictor.trainer import SeriesModel
from foretoken.predictor.transfer.device_transfer import DeviceTransferRegressor

# Orders in which features are switched, each from another row of the background. With these another
# seed moves a factor by at most 1 to 2 %.
_NUM_ORDERS = 256


def attribute(
    function: Callable[[Matrix], FloatColumn],
    call: FloatColumn,
    background: Matrix,
    seed: int = 0,
) -> FloatColumn:
    """Return what each feature of a call adds to the answer.

    `call` (F,) is switched on feature by feature over rows drawn from `background` (N, F). The sum
    is the call's answer less the mean answer of the rows drawn. Equal seeds give equal values.
    """
    random = np.random.default_rng(seed)
    num_features = len(call)
    # In which step of an order each feature is switched.
    step = random.permuted(np.tile(np.arange(num_features), (_NUM_ORDERS, 1)), axis=1)
    start = background[random.integers(len(background), size=_NUM_ORDERS)]
    steps_done = np.arange(num_features + 1)[np.newaxis, :, np.newaxis]
    is_switched = step[:, np.newaxis, :] < steps_done
    paths = np.where(is_switched, call, start[:, np.newaxis, :])
    answers = function(paths.reshape(-1, num_features)).reshape(_NUM_ORDERS, -1)
    gains = np.take_along_axis(np.diff(answers, axis=1), step, axis=1)
    return np.asarray(gains.mean(axis=0))


Predict = Callable[[LatencyQuery], LatencyReply]

# As many as a person reads.
_NUM_CONTRIBUTIONS = 8
_NUM_NEIGHBOURS = 8
# Points that stand for a series where the average of its answers is asked for.
_NUM_BACKGROUND = 1_000

_TIER_NAMES = {
    Tier.GRID: "inside",
    Tier.GAP: "gap",
    Tier.NEW_CONFIGURATION: "new configuration",
    Tier.BEYOND: "beyond",
    Tier.FAR_CONFIGURATION: "beyond",
}


def explain(models: ModelSet, query: LatencyQuery, predict: Predict) -> Explanation:
    """Return why the estimate of a single call is what it is; `predict` gives the estimate.

    Where another device of the same chip answers, models and points are those of that device.

    Raises:
        InvalidRequestError: the query is not of exactly one call.
        what `predict` raises.

    """
    table = _only_call(query)
    estimate = pick_estimate(predict(query))
    spec = find_operator(table.operator)
    target = find_target(spec, query.device, query.topology, table.dtype, table.phase)
    columns = read_columns(spec, table.columns)
    limits = compute_limits(spec, columns, target)
    explanation = Explanation(
        estimate=estimate,
        floor_us=float(limits.floor_us[0]),
        compute_us=float(limits.compute_us[0]),
        memory_us=float(limits.memory_us[0]),
        efficiency_ratio=float(limits.roofline_us[0]) / estimate.latency_us,
        tier="unmeasured",
    )
    wanted = Wanted.of(query, table)
    place = target
    if _is_inside_node(columns):
        place = target_inside_node(target)
        place = target_linked_alike(models, spec, place, wanted) or place
    source = find_source(models, spec, place, wanted)
    if source is None:
        return explanation
    design = build_design(spec, columns, source.target)
    return _with_model(explanation, source.choice.model, design)


def _is_inside_node(columns: Columns) -> bool:
    return "num_nodes" in columns and int(columns["num_nodes"][0]) <= 1


def _only_call(query: LatencyQuery) -> OperatorTable:
    num_calls = sum(table.num_rows for table in query.tables)
    if len(query.tables) != 1 or num_calls != 1:
        reason = f"an explanation is of one call, not of {num_calls}"
        raise InvalidRequestError.of_field("tables", reason)
    return query.tables[0]


def _with_model(explanation: Explanation, model: SeriesModel, design: Design) -> Explanation:
    tiers = model.reach.coverage.tiers(design, model.reach.index.find(design))
    known = replace(
        explanation,
        tier=_TIER_NAMES[Tier(int(tiers[0]))],
        neighbours=tuple(_neighbours(model.series, design)),
    )
    regressor, own_share = model.regressor, 1.0
    if isinstance(regressor, DeviceTransferRegressor):
        own_share, regressor = regressor.own_share, regressor.own
    # A collective's curves have no parts.
    if not isinstance(regressor, SeriesRegressor):
        return known
    answers = model.regressor.predict(design, tiers).members
    # Other devices, where they have a say, come last.
    weights = [*(own_share * regressor.shares[tiers[0]]).tolist(), 1.0 - own_share][: len(answers)]
    return replace(
        known,
        members=tuple(_members(answers, weights, float(design.base_us[0]))),
        contributions=tuple(_contributions(regressor.members, model.series, design)),
    )


def _members(
    answers: Mapping[str, FloatColumn], weights: Iterable[float], base_us: float
) -> Iterator[MemberAnswer]:
    """Yield what each part of the model says, the weightiest first."""
    weighted = zip(answers, weights, strict=True)
    for name, weight in sorted(weighted, key=lambda pair: -pair[1]):
        latency_us = base_us * float(np.exp(answers[name][0]))
        yield MemberAnswer(name=name, latency_us=latency_us, weight_ratio=weight)


def _contributions(members: Members, series: Series, design: Design) -> Iterator[Contribution]:
    """Yield the features that move the trees' answer most."""

    def answer(inputs: Matrix) -> FloatColumn:
        return np.asarray(inputs[:, -1] + members.trees.predict(inputs))

    def inputs_of(calls: Design) -> Matrix:
        return tree_inputs(calls, members.law.log_ratio(calls))

    spec, call = series.key.spec, inputs_of(design)[0]
    moves_log = attribute(answer, call, inputs_of(_background(series)))
    names = (*feature_names(spec), "log_law_over_base")
    for place in np.argsort(-np.abs(moves_log), kind="stable")[:_NUM_CONTRIBUTIONS]:
        factor = float(np.exp(moves_log[place]))
        yield Contribution(feature=names[place], value=float(call[place]), factor=factor)


def _background(series: Series) -> Design:
    num_points = len(series.points)
    rows = np.linspace(0, num_points - 1, min(num_points, _NUM_BACKGROUND)).astype(np.int64)
    columns = {name: column[rows] for name, column in series.columns.items()}
    return build_design(series.key.spec, columns, series.key.target)


def _neighbours(series: Series, design: Design) -> Iterator[MeasuredNeighbour]:
    """Yield the nearest measured points, by the dimension that differs most."""
    apart = np.abs(np.log2(1.0 + series.points) - design.log_points)
    octaves = apart.max(axis=1)
    # Of points equally far in that dimension, the one nearer in all of them first.
    order = np.lexsort((apart.sum(axis=1), octaves))
    for row in order[:_NUM_NEIGHBOURS]:
        dims = zip(series.key.spec.dim_names, series.points[row].tolist(), strict=True)
        yield MeasuredNeighbour(
            dims=dict(dims),
            latency_us=float(series.latency_us[row]),
            distance_octaves=float(octaves[row]),
        )
