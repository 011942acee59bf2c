"""Between which times a collective lies: the bound of its links, and what documents say is reached.

Measurements of other links, and laws beyond the last size measured, may say anything. What links
carry, and what tuned libraries are known to reach of them, bounds every answer that is not
interpolated.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from foretoken.domain.hardware.topology import Link, TopologySpec, all_topologies
from foretoken.domain.measurements.estimate import COVERED_PROVENANCES, LatencyColumns
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.roofline import Columns, FloatColumn, Target
from foretoken.predictor.transfer.links import HIGH_RATIO, reached_ratios


@dataclass(frozen=True, slots=True)
class LinkBand:
    """The least and the most that calls can take, in µs."""

    low_us: FloatColumn
    high_us: FloatColumn


def link_band(
    spec: OperatorSpec, columns: Columns, topology: TopologySpec, design: Design
) -> LinkBand:
    """Return the band of every call of a collective.

    No less than a small message takes, nor than its bytes at the full rate of the links. No more
    than a ring that waits at every hop, at the share of the links that documents say is reached:
    of these links, else the least that one says of any.
    """
    start_us = design.base_us - design.roofline_us
    least_us = design.roofline_us * _sent_ratio(spec, columns)
    is_inside = columns["num_nodes"] <= 1
    inside, between = (ratio or least_reached_ratio() for ratio in reached_ratios(spec, topology))
    wire_us = design.roofline_us / np.where(is_inside, inside, between)
    most_us = HIGH_RATIO * (start_us + wire_us + _waiting_us(spec, columns, topology))
    return LinkBand(np.maximum(start_us, least_us), most_us)


def hold_to_links(
    spec: OperatorSpec, columns: Columns, target: Target, found: LatencyColumns
) -> LatencyColumns:
    """Return a collective's estimates, those that are not covered held to the band of its links.

    Where the nearest measured point is itself outside, as on links that are slower than their file
    says, the band is moved until it is not.
    """
    topology = target.topology
    is_beyond = ~np.isin(found.provenance, COVERED_PROVENANCES)
    if topology is None or not is_beyond.any():
        return found
    design = build_design(spec, columns, target)
    band = link_band(spec, columns, topology, design)
    band = _move_to_nearest(spec, target, found, band, design)

    def held(times_us: npt.ArrayLike) -> FloatColumn:
        inside_us = np.clip(np.asarray(times_us), band.low_us, band.high_us)
        return np.where(is_beyond, inside_us, np.asarray(times_us))

    return replace(
        found,
        latency_us=held(found.latency_us),
        low_us=held(found.low_us),
        high_us=held(found.high_us),
    )


def is_within_links(
    spec: OperatorSpec, columns: Columns, topology: TopologySpec, design: Design, times: FloatColumn
) -> npt.NDArray[np.bool_]:
    """Tell which measured times, in µs, are within the band: others say nothing of other links."""
    band = link_band(spec, columns, topology, design)
    return (times >= band.low_us) & (times <= band.high_us)


@cache
def least_reached_ratio() -> float:
    """Return the least share of a link that a topology's file says is reached."""
    links = _documented_links()
    ratios = [ratio for link in links for ratio in (link.reached_ratio, link.exchange_ratio)]
    return min(filter(None, ratios), default=1.0)


@cache
def _slowest_hop_us(*, is_inside: bool) -> float:
    """Return the longest hop that a topology's file tells of, inside a node or between nodes."""
    links = _documented_links()[0 if is_inside else 1 :: 2]
    return max((link.hop_latency_us for link in links), default=0.0)


@cache
def _documented_links() -> tuple[Link, ...]:
    """Return every topology's links, one inside a node and one between nodes in turn."""
    found = all_topologies().values()
    return tuple(link for item in found for link in (item.intra_node, item.inter_node))


def _sent_ratio(spec: OperatorSpec, columns: Columns) -> FloatColumn | float:
    """Return which part of what a ring sends a rank has to send at least.

    Switches that add up send an all-reduce once (NVLink SHARP), where a ring sends it twice but
    for a rank's own part.
    """
    if spec.name != "all_reduce":
        return 1.0
    num_ranks = columns["devices_per_node"] * columns["num_nodes"]
    return np.asarray(num_ranks / (2.0 * np.maximum(num_ranks - 1.0, 1.0)))


def _waiting_us(spec: OperatorSpec, columns: Columns, topology: TopologySpec) -> FloatColumn:
    """Return what a ring's hops take one after the other; those of an all-reduce come twice."""
    num_nodes = columns["num_nodes"].astype(np.float64)
    inside_us, between_us = (
        link.hop_latency_us or _slowest_hop_us(is_inside=is_inside)
        for link, is_inside in ((topology.intra_node, True), (topology.inter_node, False))
    )
    inside = num_nodes * (columns["devices_per_node"] - 1.0)
    once_us = inside * inside_us + (num_nodes - 1.0) * between_us
    return np.asarray((2.0 if spec.name == "all_reduce" else 1.0) * once_us)


def _move_to_nearest(
    spec: OperatorSpec, target: Target, found: LatencyColumns, band: LinkBand, design: Design
) -> LinkBand:
    """Return the band moved by how far outside of its own the nearest measured point is.

    What that point's rate would give is within it in any case.
    """
    rows = np.flatnonzero(np.isfinite(found.nearest_octaves) & (np.asarray(found.nearest_us) > 0))
    if target.topology is None or not len(rows) or not found.nearest:
        return band
    known = {name: np.asarray(found.nearest[name])[rows] for name in spec.dim_names}
    measured = build_design(spec, known, target)
    there = link_band(spec, known, target.topology, measured)
    nearest_us = np.asarray(found.nearest_us)[rows]
    same_rate_us = nearest_us * design.roofline_us[rows] / measured.roofline_us
    low_us, high_us = band.low_us.copy(), band.high_us.copy()
    below, above = nearest_us / there.low_us, nearest_us / there.high_us
    moved_us = np.minimum(low_us[rows] * below, same_rate_us)
    low_us[rows] = np.where(below < 1.0, moved_us, low_us[rows])
    moved_us = np.maximum(high_us[rows] * above, same_rate_us)
    high_us[rows] = np.where(above > 1.0, moved_us, high_us[rows])
    return LinkBand(low_us, high_us)
