"""Collectives on links that they were not measured on, estimated from what else was.

What one collective reaches of the links of a topology, another reaches as well: a host whose PCIe
gives 15 GB/s to an all-reduce gives no 36 to an all-gather. Where nothing was measured documents
answer, and every answer that is not interpolated is held to what the links can carry.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foretoken.domain.measurements.estimate import LatencyColumns, Provenance
from foretoken.domain.operators.spec.operator import OperatorSpec, find_operator
from foretoken.predictor.features import build_design
from foretoken.predictor.intervals.doubt import widen
from foretoken.predictor.model_set import ModelSet, Wanted
from foretoken.predictor.query_columns import Call
from foretoken.predictor.roofline import IntColumn, Target
from foretoken.predictor.source import Source, find_source
from foretoken.predictor.transfer.link_band import hold_to_links
from foretoken.predictor.transfer.links import choose_rows, estimate_from_links, has_document
from foretoken.predictor.transfer.messages import HALVES_OF_ALL_REDUCE

# Which other collectives are asked, those first that tell most of the others. Source: tables of
# NCCL on A100, H100, H200, B200 and RTX PRO 6000, one collective left out and estimated from one of
# the same message and group: halves of an all-reduce by each other 5 to 7 % off on average, by or
# of exchanges 11 to 20 %, by or of all-reduces 15 to 25 %, where the same collective on other
# devices is 11 to 60 % off; by a transfer between two 14 to 56 %, which documents come before.
_TELLERS = ("reduce_scatter", "all_gather", "all_to_all", "all_reduce", "broadcast")
_PAIR = "send_recv"
# Within which factor nine tenths of those are: 2.06 times a mean error that is normal.
_HALF_DOUBT_LOG, _OTHER_DOUBT_LOG = 0.14, 0.45
# By how much large messages on nodes linked alike differ: those of eight H100 and H200 by 7 %,
# all-reduces by 19 (see `find_linked_alike`). What differs by more has other links.
_ALIKE_LOG = float(np.log(1.25))

_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LinkedCollectives:
    """Answers for collectives: `from_source` gives the estimates of a source's measurements."""

    models: ModelSet
    from_source: Callable[[Call, Source], LatencyColumns]

    def complete(
        self, call: Call, wanted: Wanted, own: Source | None, found: LatencyColumns
    ) -> LatencyColumns:
        """Return a collective's estimates, those of its own measurements or of other devices.

        Calls over links on which the collective itself was measured, inside nodes or between them,
        stay as they are. Others are estimated from what other software took there, else from what
        else was measured, else from documents, else from transfers between two devices.
        """
        is_known = _crosses_links_of(own, call)
        held = hold_to_links(call.spec, call.columns, call.target, found)
        if is_known.all():
            return held
        rest = held
        sources = {between: _find_software(own, is_between=between) for between in (False, True)}
        unknown = [is_between for is_between, source in sources.items() if source is None]
        for is_between in unknown:
            rest = self._follow_other(call, wanted, rest, (_PAIR,), is_between=is_between)
        rest = _follow_documents(call, rest)
        for is_between in unknown:
            rest = self._follow_other(call, wanted, rest, _TELLERS, is_between=is_between)
        for is_between, source in sources.items():
            if source is not None and source is not own:
                rest = self._follow_software(call, source, rest, is_between=is_between)
        return choose_rows(is_known, held, rest, ("links measured", "other links"))

    def correct_alike(
        self, call: Call, wanted: Wanted, alike: Target, moved: LatencyColumns
    ) -> LatencyColumns:
        """Return estimates from nodes linked alike, corrected where own links were measured slower.

        Or faster: by what large messages of one collective that was measured on both took.
        """
        for spec in _but(call.spec, (*_TELLERS, _PAIR)):
            own, other = (
                self._find(spec, target, wanted, is_between=False)
                for target in (call.target, alike)
            )
            if own is None or other is None:
                continue
            ratio = _rate_ratio(own, is_between=False) / _rate_ratio(other, is_between=False)
            return moved if abs(np.log(ratio)) < _ALIKE_LOG else _scale(moved, ratio)
        return moved

    def _follow_software(
        self, call: Call, source: Source, found: LatencyColumns, *, is_between: bool
    ) -> LatencyColumns:
        """Return calls over one class of links as a source of other software measured them."""
        rows = np.flatnonzero((call.columns["num_nodes"] > 1) == is_between)
        if not len(rows):
            return found
        columns = {name: column[rows] for name, column in call.columns.items()}
        answered = self.from_source(replace(call, columns=columns), source)
        held = hold_to_links(call.spec, columns, call.target, answered)
        return _put_rows(found, rows, held)

    def _follow_other(
        self,
        call: Call,
        wanted: Wanted,
        found: LatencyColumns,
        tellers: Sequence[str],
        *,
        is_between: bool,
    ) -> LatencyColumns:
        """Return calls over one class of links as another collective tells that was timed there."""
        rows = np.flatnonzero((call.columns["num_nodes"] > 1) == is_between)
        if not len(rows):
            return found
        columns = {name: column[rows] for name, column in call.columns.items()}
        for spec in _but(call.spec, tellers):
            source = self._find(spec, call.target, wanted, is_between=is_between)
            if source is None:
                continue
            table = replace(call.table, operator=spec.name, variant="", kernel="")
            other = Call(spec, table, columns, call.target)
            reached = hold_to_links(spec, columns, call.target, self.from_source(other, source))
            rate = _rate_ratio(source, is_between=is_between)
            moved = _move(replace(call, columns=columns), spec, reached, rate)
            return _put_rows(found, rows, moved)
        return found

    def _find(
        self, spec: OperatorSpec, target: Target, wanted: Wanted, *, is_between: bool
    ) -> Source | None:
        """Return where a collective was measured on a target's links of one class."""
        plain = replace(wanted, variant="", kernel="")
        source = find_source(self.models, spec, target, plain)
        if source is None or source.target is not target:
            return None
        return source if _has_class(source, is_between=is_between) else None


def _but(spec: OperatorSpec, names: Sequence[str]) -> Iterator[OperatorSpec]:
    return (find_operator(name) for name in names if name != spec.name)


def _find_software(own: Source | None, *, is_between: bool) -> Source | None:
    """Return the nearest software, its own first, that measured links of one class, if any did."""
    if own is None or _has_class(own, is_between=is_between):
        return own
    others = (replace(own, choices=own.choices[place:]) for place in range(1, len(own.choices)))
    return next((it for it in others if _has_class(it, is_between=is_between)), None)


def _has_class(source: Source, *, is_between: bool) -> bool:
    """Tell whether a source measured links of one class, those between nodes or inside them."""
    known = source.choice.model.series.columns["num_nodes"] > 1
    return bool((known == is_between).any())


def _scale(found: LatencyColumns, ratio: float) -> LatencyColumns:
    return replace(
        found,
        latency_us=np.asarray(found.latency_us) * ratio,
        low_us=np.asarray(found.low_us) * ratio,
        high_us=np.asarray(found.high_us) * ratio,
    )


def _put_rows(found: LatencyColumns, rows: IntColumn, part: LatencyColumns) -> LatencyColumns:
    """Return an answer with some of its rows those of another."""
    if len(rows) == len(found.latency_us):
        return part
    place = np.zeros(len(found.latency_us), dtype=np.int64)
    place[rows] = np.arange(len(rows))
    is_part = np.zeros(len(place), dtype=np.bool_)
    is_part[rows] = True
    return choose_rows(is_part, _take(part, place), found, ("links of another", "the others"))


def _take(found: LatencyColumns, rows: IntColumn) -> LatencyColumns:
    return replace(
        found,
        latency_us=np.asarray(found.latency_us)[rows],
        low_us=np.asarray(found.low_us)[rows],
        high_us=np.asarray(found.high_us)[rows],
        provenance=np.asarray(found.provenance)[rows],
        nearest={name: np.asarray(column)[rows] for name, column in found.nearest.items()},
        nearest_us=np.asarray(found.nearest_us)[rows],
        nearest_octaves=np.asarray(found.nearest_octaves)[rows],
    )


def _crosses_links_of(source: Source | None, call: Call) -> _Mask:
    """Return which calls cross links, inside nodes or between them, that a source measured."""
    is_between = call.columns["num_nodes"] > 1
    if source is None:
        return np.zeros(len(is_between), dtype=np.bool_)
    knows = [_has_class(source, is_between=other) for other in (False, True)]
    return np.where(is_between, knows[1], knows[0])


def _follow_documents(call: Call, found: LatencyColumns) -> LatencyColumns:
    """Return what documents say of the links that a call crosses, where they do."""
    topology = call.target.topology
    if topology is None:
        return found
    has_any = has_document(call.spec, call.columns, topology)
    if not has_any.any():
        return found
    design = build_design(call.spec, call.columns, call.target)
    linked = estimate_from_links(call.spec, call.columns, topology, design)
    return choose_rows(has_any, linked, found, ("links with a document", "the others"))


def _move(call: Call, other: OperatorSpec, reached: LatencyColumns, rate: float) -> LatencyColumns:
    """Return a collective's times from another's of the same messages and groups.

    Each takes the same multiple of its links' bound and of what a small message takes. A transfer
    between two waits for no others: from it, or of it, the `rate` of large messages alone counts,
    how many times longer they take than at the full rate of the links.
    """
    asked, known = (build_design(spec, call.columns, call.target) for spec in (call.spec, other))
    other_us, topology = np.asarray(reached.latency_us), call.target.topology
    latency_us = other_us * asked.base_us / known.base_us
    if _PAIR in (call.spec.name, other.name) and topology is not None:
        linked = estimate_from_links(call.spec, call.columns, topology, asked, 1.0 / rate)
        latency_us = np.asarray(linked.latency_us)
    is_half = {call.spec.name, other.name} == set(HALVES_OF_ALL_REDUCE)
    scale = latency_us / other_us
    num_rows = len(latency_us)
    moved = LatencyColumns(
        latency_us=latency_us,
        low_us=np.asarray(reached.low_us) * scale,
        high_us=np.asarray(reached.high_us) * scale,
        provenance=np.full(num_rows, Provenance.TRANSFERRED.value),
        nearest_us=np.zeros(num_rows),
        nearest_octaves=np.full(num_rows, np.inf),
        basis=f"what {other.name} reaches of the same links: {reached.basis}",
        other_framework=reached.other_framework,
    )
    return widen(moved, _HALF_DOUBT_LOG if is_half else _OTHER_DOUBT_LOG)


def _rate_ratio(source: Source, *, is_between: bool) -> float:
    """Return how many times longer than at the full rate of the links large messages took."""
    series = source.choice.model.series
    is_alike = (series.columns["num_nodes"] > 1) == is_between
    messages = np.where(is_alike, series.columns["message_bytes"], 0)
    rows = np.flatnonzero(2 * messages >= messages.max())
    return float(np.median(series.latency_us[rows] / series.design.roofline_us[rows]))
