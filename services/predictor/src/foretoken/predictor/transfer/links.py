"""Collectives on links that nobody measured, estimated from what documents say of its links."""

import numpy as np
import numpy.typing as npt

from foretoken.domain.hardware.topology import TopologySpec
from foretoken.domain.measurements.estimate import LatencyColumns, Provenance
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.features import Design
from foretoken.predictor.roofline import Columns, FloatColumn
from foretoken.predictor.transfer.all_reduce_law import estimate_all_reduce

# As slow as groups are that share switches with others.
HIGH_RATIO = 1.5
_EXCHANGE = "all_to_all"


def estimate_from_links(
    spec: OperatorSpec,
    columns: Columns,
    topology: TopologySpec,
    design: Design,
    reached_ratio: float = 0.0,
) -> LatencyColumns:
    """Return the time of collectives at the share of the links that large messages reach.

    Source: the topology's file names the document; without one all of a link counts as reached.
    A `reached_ratio` that was measured is given.
    """
    is_inside = columns["num_nodes"] <= 1
    known = reached_ratios(spec, topology)
    reached = np.where(is_inside, *((reached_ratio,) * 2 if reached_ratio else known))
    roofline_us = design.roofline_us / np.where(reached > 0, reached, 1.0)
    floor_us = design.base_us - design.roofline_us
    latency_us = floor_us + roofline_us + _passing_us(spec, columns, topology)
    rows = np.flatnonzero(~is_inside) if spec.name == "all_reduce" else ()
    if len(rows):
        between = {name: column[rows] for name, column in columns.items()}
        told_us = estimate_all_reduce(between, roofline_us[rows], topology)
        latency_us[rows] = np.maximum(told_us, design.base_us[rows])
    num_rows = len(columns["num_nodes"])
    return LatencyColumns(
        latency_us=latency_us,
        low_us=design.base_us,
        high_us=latency_us * HIGH_RATIO,
        provenance=np.full(num_rows, Provenance.ANALYTICAL.value),
        nearest_us=np.zeros(num_rows),
        nearest_octaves=np.full(num_rows, np.inf),
        basis=f"no measurement; the links of {topology.name} and what documents say they reach",
    )


def _passing_us(spec: OperatorSpec, columns: Columns, topology: TopologySpec) -> FloatColumn:
    """Return what the ranks add that a message passes, each once; a pair has none.

    An all-reduce inside a node passes them there and back. In an exchange every rank sends to all
    others itself, on its node and on the others at once; the rest go round a ring.
    """
    num_nodes = columns["num_nodes"].astype(np.float64)
    if spec.name == "send_recv":
        return np.zeros_like(num_nodes)
    inside_us = (columns["devices_per_node"] - 1) * topology.intra_node.hop_latency_us
    if spec.name == "all_reduce":
        return np.asarray(2 * inside_us)
    between_us = (num_nodes - 1) * topology.inter_node.hop_latency_us
    if spec.name == _EXCHANGE:
        return np.asarray(np.maximum(inside_us, between_us))
    return np.asarray(num_nodes * inside_us + between_us)


def has_document(
    spec: OperatorSpec, columns: Columns, topology: TopologySpec
) -> npt.NDArray[np.bool_]:
    """Tell of which calls documents say what they reach of the links they cross."""
    is_inside = columns["num_nodes"] <= 1
    inside, between = reached_ratios(spec, topology)
    return np.where(is_inside, inside > 0, between > 0)


def reached_ratios(spec: OperatorSpec, topology: TopologySpec) -> tuple[float, float]:
    """Return what documents say is reached of the links inside a node, and of those between."""
    inside, between = topology.intra_node, topology.inter_node
    if spec.name != _EXCHANGE:
        return inside.reached_ratio, between.reached_ratio
    return (
        inside.exchange_ratio or inside.reached_ratio,
        between.exchange_ratio or between.reached_ratio,
    )


def choose_rows(
    is_first: npt.NDArray[np.bool_],
    first: LatencyColumns,
    second: LatencyColumns,
    names: tuple[str, str],
) -> LatencyColumns:
    """Return the rows of one answer where the mask is set, those of another elsewhere.

    `names` say in words which rows are which.
    """
    if is_first.all():
        return first
    if not is_first.any():
        return second

    def pick(name: str) -> object:
        return np.where(is_first, getattr(first, name), getattr(second, name))

    return LatencyColumns(
        latency_us=pick("latency_us"),
        low_us=pick("low_us"),
        high_us=pick("high_us"),
        provenance=pick("provenance"),
        nearest={
            name: np.where(is_first, first.nearest.get(name, 0), second.nearest.get(name, 0))
            for name in {**first.nearest, **second.nearest}
        },
        nearest_us=pick("nearest_us"),
        nearest_octaves=pick("nearest_octaves"),
        basis=f"{names[0]}: {first.basis}; {names[1]}: {second.basis}",
        other_framework=join_names(first.other_framework, second.other_framework),
    )


def join_names(*texts: str) -> str:
    """Return all names of texts that list some, each once."""
    names = (name for text in texts for name in text.split(", ") if name)
    return ", ".join(dict.fromkeys(names))
