"""Collectives of sizes that were not measured, estimated from sizes and collectives that were."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from foretoken.domain.measurements.estimate import LatencyColumns, Provenance
from foretoken.predictor.roofline import Columns, FloatColumn, IntColumn

# A ring all-reduce is a reduce-scatter and an all-gather one after the other.
HALVES_OF_ALL_REDUCE = ("all_gather", "reduce_scatter")

Ask = Callable[[str, Columns], LatencyColumns]

# Where what was measured is read: around the nearest point, which alone may be an outlier.
_BELOW = 0.9
# How much nearer, in octaves, an all-reduce must have been measured to say more.
_MIN_NEARER_OCTAVES = 0.5
_MESSAGE, _NODES = "message_bytes", "num_nodes"
_Mask = npt.NDArray[np.bool_]


def complete_sizes(
    operator: str, columns: Columns, found: LatencyColumns, ask: Ask
) -> LatencyColumns:
    """Return estimates that far from measurements follow what holds for all sizes.

    Beyond the largest message measured on the group, time grows in proportion to the message: what
    the links carry by then they carry of more. Halves of an all-reduce have its shape elsewhere,
    where that is known better: `ask` returns the estimates of an operator's calls.
    """
    if _MESSAGE not in found.nearest:
        return found
    is_larger = _is_larger(columns, found)
    if is_larger.any():
        found = _keep_rate(operator, columns, found, is_larger, ask)
    if operator in HALVES_OF_ALL_REDUCE:
        found = _follow_all_reduce(operator, columns, found, is_larger, ask)
    return found


def _is_larger(columns: Columns, found: LatencyColumns) -> _Mask:
    """Tell which messages are larger than any measured on their very group."""
    is_same_group = np.all(
        [found.nearest[name] == column for name, column in columns.items() if name != _MESSAGE],
        axis=0,
    )
    is_larger = is_same_group & (columns[_MESSAGE] > found.nearest[_MESSAGE])
    return np.asarray(is_larger & (found.provenance == Provenance.EXTRAPOLATED.value))


def _keep_rate(
    operator: str, columns: Columns, found: LatencyColumns, is_larger: _Mask, ask: Ask
) -> LatencyColumns:
    reference = _below(found.nearest[_MESSAGE][is_larger])
    known = {name: column[is_larger] for name, column in columns.items()}
    [reference_us] = _ask_distinct({**known, _MESSAGE: reference}, (operator,), ask)
    rate_us = reference_us / reference
    latency_us = found.latency_us.copy()
    latency_us[is_larger] = rate_us * known[_MESSAGE]
    return _scale(found, latency_us / found.latency_us)


def _follow_all_reduce(
    operator: str, columns: Columns, found: LatencyColumns, is_larger: _Mask, ask: Ask
) -> LatencyColumns:
    """Return rows far from what was measured as a part of the all-reduce of the same message.

    That part is half by the ring, and at the nearest measured point as it is there: in between.
    """
    # Nearer to a measurement nothing can be that much nearer.
    rows = np.flatnonzero((found.nearest_octaves > _MIN_NEARER_OCTAVES) & ~is_larger)
    if not len(rows):
        return found
    whole = ask("all_reduce", {name: column[rows] for name, column in columns.items()})
    is_nearer = whole.nearest_octaves + _MIN_NEARER_OCTAVES < found.nearest_octaves[rows]
    # Nor does one tell of links between nodes that was measured inside them alone.
    num_nodes = whole.nearest.get(_NODES, columns[_NODES][rows])
    is_nearer &= (num_nodes > 1) == (columns[_NODES][rows] > 1)
    rows = rows[is_nearer]
    if not len(rows):
        return found
    nearest = {name: found.nearest[name][rows] for name in columns}
    nearest[_MESSAGE] = _below(nearest[_MESSAGE])
    own_us, whole_us = _ask_distinct(nearest, (operator, "all_reduce"), ask)
    part = np.sqrt(0.5 * np.clip(own_us / whole_us, 0.5, 1.0))
    latency_us, low_us, high_us = found.latency_us.copy(), found.low_us.copy(), found.high_us.copy()
    latency_us[rows] = part * whole.latency_us[is_nearer]
    low_us[rows] = np.minimum(0.5 * whole.low_us[is_nearer], latency_us[rows])
    high_us[rows] = np.maximum(whole.high_us[is_nearer], latency_us[rows])
    return replace(
        found,
        latency_us=latency_us,
        low_us=low_us,
        high_us=high_us,
        basis=f"{found.basis}; where it was not measured, a part of all_reduce: {whole.basis}",
    )


def _ask_distinct(columns: Columns, operators: tuple[str, ...], ask: Ask) -> list[FloatColumn]:
    """Return what each operator takes; of many calls near few measured points each asked once."""
    points = np.stack(list(columns.values()), axis=1)
    distinct, places = np.unique(points, axis=0, return_inverse=True)
    known = dict(zip(columns, distinct.T, strict=True))
    return [ask(operator, known).latency_us[places.ravel()] for operator in operators]


def _below(messages: IntColumn) -> IntColumn:
    return (_BELOW * messages).astype(np.int64)


def _scale(found: LatencyColumns, factor: FloatColumn) -> LatencyColumns:
    return replace(
        found,
        latency_us=found.latency_us * factor,
        low_us=found.low_us * factor,
        high_us=found.high_us * factor,
    )
