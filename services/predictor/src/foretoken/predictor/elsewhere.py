"""Estimates of what nobody measured on a device or its chip, from other devices."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.measurements.estimate import COVERED_PROVENANCES, LatencyColumns
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.intervals.doubt import hold_both
from foretoken.predictor.model_set import ModelSet, Wanted
from foretoken.predictor.query_columns import Call
from foretoken.predictor.source import Source, find_relatives
from foretoken.predictor.transfer.device_law import DeviceLaw
from foretoken.predictor.transfer.exponentials import hold_to_exponentials
from foretoken.predictor.transfer.own_points import Places, Reference
from foretoken.predictor.transfer.relatives import Shown, apart_log, combine, fit_series_law
from foretoken.predictor.typical import find_floor_us, from_transfer

# What a source answers to a call that stands on its device.
Answer = Callable[[Call, Source], LatencyColumns]


class Elsewhere:
    """Estimates from other devices of one set of models."""

    def __init__(self, models: ModelSet, answer: Answer) -> None:
        """Keep the models, and what queries one of their sources."""
        self._models = models
        self._answer = answer

    def relatives(self, call: Call, wanted: Wanted) -> Sequence[Source]:
        """Return the sources on other chips that have a say."""
        return find_relatives(self._models, call.spec, call.target, wanted)

    def estimate(self, call: Call, relatives: Sequence[Source], design: Design) -> Reference:
        """Return what relatives show of the engine and what is typical."""
        spec, target = call.spec, call.target
        transfer = self._models.transfer(spec, target.device, call.table.variant, target.dtype)
        typical = from_transfer(transfer, call, design)
        if not relatives:
            return Reference(typical, Places.of_axes(design.axes))
        asked = hold_to_exponentials(spec, target.device, design)
        shown = [self._show(call, source, asked) for source in relatives]
        bases = "; ".join(source.choice.basis for source in relatives)
        basis = f"{bases}, moved by data sheets; {typical.basis}"
        floor_us = find_floor_us(call, asked)
        every = combine(typical, asked, floor_us, shown, target.dtype, basis)
        nearest = relatives[0]
        if not nearest.ran_slow_kernels(transfer.support):
            return every
        rest = Reference(typical, Places.of_axes(design.axes))
        if shown[1:]:
            rest = combine(typical, asked, floor_us, shown[1:], target.dtype, basis)
        # Its kernels of another kind may be those of the device asked about, too, or not.
        is_alike = nearest.target.device.architecture == target.device.architecture
        found, other = (every, rest) if is_alike else (rest, every)
        return replace(found, found=hold_both(found.found, other.found))

    def _show(self, call: Call, source: Source, asked: Design) -> Shown:
        spec, device = call.spec, source.target.device
        there = build_design(spec, call.columns, source.target)
        there = hold_to_exponentials(spec, device, there)
        found = self._answer(replace(call, target=source.target), source)
        is_covered = np.isin(found.provenance, COVERED_PROVENANCES)
        return Shown(
            apart_log(call.target.device, device),
            np.where(is_covered, np.log(found.latency_us / there.base_us), np.nan),
            self._law(source).log_ratio(asked),
        )

    def _law(self, source: Source) -> DeviceLaw:
        name, laws = source.choice.head.content_hash, self._models.laws
        if name not in laws:
            laws[name] = fit_series_law(source.choice.model.series)
        return laws[name]
