"""Answer a query: the measurement where there is one, the model around it, the roofline beyond."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from foretoken.domain.call_scope import check_wanted
from foretoken.domain.errors import InvalidRequestError, NotTrainedError
from foretoken.domain.hardware.device import DeviceSpec, find_device
from foretoken.domain.measurements.estimate import (
    COVERED_PROVENANCES,
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
    Phase,
    Provenance,
)
from foretoken.domain.operators.spec.operator import OperatorSpec, find_operator
from foretoken.predictor.chain import backward_ratio, is_chain, lengthen
from foretoken.predictor.elsewhere import Answer, Elsewhere
from foretoken.predictor.estimate_cache import EstimateCache, cache_key
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.intervals.coverage import is_extrapolated
from foretoken.predictor.intervals.doubt import widen
from foretoken.predictor.linked_collectives import LinkedCollectives
from foretoken.predictor.model_set import Choice, ModelSet, Wanted
from foretoken.predictor.narrow_weights import find_whole, narrow
from foretoken.predictor.query_check import check_group, refuse_extrapolation
from foretoken.predictor.query_columns import Call, find_target, read_columns
from foretoken.predictor.repeated_calls import find_repeated
from foretoken.predictor.roofline import Columns, FloatColumn, IntColumn, Target
from foretoken.predictor.source import (
    Source,
    answer_doubt_log,
    choose_correction,
    find_source,
    find_sources,
    may_join,
    target_inside_node,
    target_linked_alike,
)
from foretoken.predictor.sustained import sustain
from foretoken.predictor.transfer.links import choose_rows
from foretoken.predictor.transfer.memory_bound import hold_to_bandwidth
from foretoken.predictor.transfer.messages import complete_sizes
from foretoken.predictor.transfer.own_points import (
    OwnCorrection,
    Places,
    Reference,
    learn_correction,
    mix_answers,
    own_share,
)
from foretoken.predictor.transfer.relatives import own_share_of
from foretoken.predictor.transfer.row_band import hold_to_memory
from foretoken.predictor.transfer.siblings import MOVED_SHARE, move_to_sibling
from foretoken.predictor.typical import from_transfer, limit_doubt, pack

# Further uncertainty about a proxy operator's times, and about a backward pass scaled from the
# forward pass.
_PROXY_LOG = float(np.log(1.3))
_SCALED_BACKWARD_LOG = float(np.log(1.5))
# Further uncertainty about a backward pass made of forward calls. Source: 4,588 backward passes of
# gemm and batched_gemm on the A100 take 0.85 to 1.15 of theirs, nine tenths of each file.
_FORWARD_CALLS_LOG = float(np.log(1.15))


_Bounds = tuple[FloatColumn, FloatColumn]
_Flags = npt.NDArray[np.bool_]


class Estimator:
    """Answers queries from one set of models."""

    def __init__(self, models: ModelSet, cache: EstimateCache | None = None) -> None:
        """Keep the models, and what remembers their estimates."""
        self._models = models
        self._cache = cache

    def predict(self, query: LatencyQuery) -> LatencyReply:
        """Return the estimates of all tables.

        Raises:
            UnknownDeviceError, UnknownTopologyError, UnknownOperatorError: no file of that name.
            UnknownMeasurementError: a framework, kernel or variant of which there is no row.
            InvalidRequestError: columns that are not the operator's dimensions.
            NotTrainedError, OutOfCoverageError: extrapolation is refused and would be needed.

        """
        if query.refuse_extrapolation and self._models.knows_nothing:
            raise NotTrainedError("no latency model is trained; run a training first")
        device = find_device(query.device)
        self._models.check_names(query)
        tables = tuple(self._recall(table, query, device) for table in query.tables)
        if query.refuse_extrapolation:
            for table, estimates in zip(query.tables, tables, strict=True):
                refuse_extrapolation(table, estimates, device)
        return LatencyReply(model_version=self._models.version, tables=tables)

    def _recall(
        self, table: OperatorTable, query: LatencyQuery, device: DeviceSpec
    ) -> LatencyColumns:
        # Of a query with many tables the rest is not worth computing when nobody waits for it.
        check_wanted()
        if self._cache is None:
            return self._sustain(table, query, device)
        key = cache_key(self._models.version, query, table)
        estimates = self._cache.find(key)
        if estimates is None:
            estimates = self._sustain(table, query, device)
            self._cache.keep(key, estimates)
        return estimates

    def _sustain(
        self, table: OperatorTable, query: LatencyQuery, device: DeviceSpec
    ) -> LatencyColumns:
        found = self._estimate(table, query, device)
        if not query.sustained or not len(found.latency_us):
            return found
        spec = find_operator(table.operator)
        target = find_target(spec, device.name, query.topology, table.dtype, table.phase)
        call = Call(spec, table, read_columns(spec, table.columns), target)
        return sustain(call, query, found)

    def _estimate(
        self, table: OperatorTable, query: LatencyQuery, device: DeviceSpec
    ) -> LatencyColumns:
        spec = find_operator(table.operator)
        columns = read_columns(spec, table.columns)
        if not len(columns[spec.dim_names[0]]):
            empty = np.empty(0)
            return pack(empty, empty, empty, np.empty(0, dtype=np.int64))
        if (repeated := find_repeated(columns)) is not None:
            once = replace(table, columns=repeated.columns)
            return repeated.spread(self._estimate(once, query, device))
        target = find_target(spec, device.name, query.topology, table.dtype, table.phase)
        call = Call(spec, table, columns, target)
        if not spec.is_collective:
            return self._answer(call, query)
        check_group(columns, target.topology)
        return self._by_place(call, query)

    def _by_place(self, call: Call, query: LatencyQuery) -> LatencyColumns:
        """Return a collective's estimates: inside a node those of the same nodes or alike ones."""
        is_inside = call.columns["num_nodes"] <= 1
        if not is_inside.any():
            return self._answer(call, query)
        target = target_inside_node(call.target)
        wanted = Wanted.of(query, call.table)
        alike = target_linked_alike(self._models, call.spec, target, wanted)
        if target is call.target and alike is None:
            return self._answer(call, query)
        nodes = replace(call, target=target)
        inside = self._answer(nodes, query) if alike is None else self._move(nodes, query, alike)
        if is_inside.all():
            return inside
        # Calls inside a node stand in a row of their own that is not looked at.
        num_nodes = np.maximum(call.columns["num_nodes"], 2)
        columns = {**call.columns, "num_nodes": num_nodes}
        across = self._answer(replace(call, columns=columns), query)
        return choose_rows(is_inside, inside, across, ("inside a node", "between nodes"))

    def _move(self, call: Call, query: LatencyQuery, alike: Target) -> LatencyColumns:
        """Return a collective's estimates from those on nodes that are linked alike."""
        links = alike.topology.name if alike.topology else ""
        place = replace(query, device=alike.device.name, topology=links)
        found = self._answer(replace(call, target=alike), place)
        measured, asked = (
            build_design(call.spec, call.columns, target) for target in (alike, call.target)
        )
        moved = move_to_sibling(found, measured.base_us, asked.base_us)
        wanted = Wanted.of(query, call.table)
        moved = self._linked(query).correct_alike(call, wanted, alike, moved)
        return replace(moved, basis=f"{found.basis}, whose nodes are linked alike")

    def _answer(self, call: Call, query: LatencyQuery) -> LatencyColumns:
        spec, target, table = call.spec, call.target, call.table
        wanted = Wanted.of(query, table)
        sources = find_sources(self._models, spec, target, wanted)
        whole = find_whole(self._models, call, wanted, sources)
        if whole is not None:
            return narrow(call, self._answer(whole, query))
        design = build_design(spec, call.columns, target)
        if spec.is_collective and (sources or table.phase is not Phase.BACKWARD):
            return self._answer_collective(call, query, next(iter(sources), None), design)
        if sources:
            return self._from_sources(call, query, sources, design)
        if table.phase is Phase.BACKWARD:
            return self._scale_forward(call, query)
        transfer = self._models.transfer(spec, target.device, table.variant, target.dtype)
        has_measured = transfer.support.has_measured(spec)
        found = None if has_measured else self._from_proxy(call, query)
        if found is None:
            elsewhere = self._elsewhere(query)
            found = elsewhere.estimate(call, elsewhere.relatives(call, wanted), design).found
        found = hold_to_bandwidth(call, design, found)
        if has_measured and is_chain(table):
            return found
        found = hold_to_memory(spec, target.device, design, found)
        return found if has_measured else lengthen(call, found)

    def _answer_collective(
        self, call: Call, query: LatencyQuery, own: Source | None, design: Design
    ) -> LatencyColumns:
        """Return a collective's estimates from its own measurements, else what its links tell."""
        spec, target, table = call.spec, call.target, call.table
        if own is not None:
            found = self._complete(call, query, self._from_source(call, query, own, design))
        else:
            transfer = self._models.transfer(spec, target.device, table.variant, target.dtype)
            found = from_transfer(transfer, call, design)
        return self._linked(query).complete(call, Wanted.of(query, table), own, found)

    def _linked(self, query: LatencyQuery) -> LinkedCollectives:
        return LinkedCollectives(self._models, self._asking(query))

    def _elsewhere(self, query: LatencyQuery) -> Elsewhere:
        return Elsewhere(self._models, self._asking(query))

    def _asking(self, query: LatencyQuery) -> Answer:
        def answer(call: Call, source: Source) -> LatencyColumns:
            design = build_design(call.spec, call.columns, call.target)
            return self._from_source(call, query, source, design)

        return answer

    def _from_sources(
        self, call: Call, query: LatencyQuery, sources: Sequence[Source], design: Design
    ) -> LatencyColumns:
        """Return what the surest source says; few points of the device's own correct another's."""
        pair = choose_correction(sources, call.target)
        if pair is None:
            return self._join_relatives(call, query, sources[0], design)
        own, reference = pair

        def refer(call: Call, design: Design) -> Reference:
            found = self._from_source(call, query, reference, design)
            return Reference(found, Places.of_axes(design.axes))

        answered = self._from_source(call, query, own, design)
        correction = self._correction(call, query, own, reference.identity, refer)
        report = own.choice.model.report
        own_error = report.held_out_mape_ratio if report.num_held_out else np.inf
        share = own_share(own_error, correction.error_ratio)
        return mix_answers(answered, correction.apply(refer(call, design)), share)

    def _join_relatives(
        self, call: Call, query: LatencyQuery, own: Source, design: Design
    ) -> LatencyColumns:
        """Return what a source says, of few own points with what they make of other chips'."""
        answered = self._from_source(call, query, own, design)
        elsewhere, wanted = self._elsewhere(query), Wanted.of(query, call.table)
        relatives = elsewhere.relatives(call, wanted) if may_join(own, call.target) else ()
        if not relatives:
            return answered

        def refer(call: Call, design: Design) -> Reference:
            return elsewhere.estimate(call, relatives, design)

        identity = tuple(source.identity for source in relatives)
        correction = self._correction(call, query, own, identity, refer)
        found = correction.apply(refer(call, design))
        return mix_answers(answered, found, own_share_of(own.choice.head.num_points))

    def _correction(
        self,
        call: Call,
        query: LatencyQuery,
        own: Source,
        identity: tuple[Hashable, ...],
        refer: Callable[[Call, Design], Reference],
    ) -> OwnCorrection:
        """Return by how much a reference is off at own points, learned once for a way to ask."""
        series = own.choice.model.series
        # What the reference answers depends on these as well.
        asked = query.prefer_measured, query.framework, call.table.variant
        key = (own.choice.head.content_hash, *identity, *asked)
        found = self._models.corrections.get(key)
        if found is None:
            columns = series.columns
            points = build_design(call.spec, columns, call.target)
            answered = refer(replace(call, columns=columns), points)
            found = learn_correction(answered, series.latency_us)
            self._models.corrections[key] = found
        return found

    def _from_source(
        self, call: Call, query: LatencyQuery, source: Source, design: Design
    ) -> LatencyColumns:
        """Return what a series says, moved to the device asked about where it is another's."""
        spec, device = call.spec, call.target.device
        is_own = source.target is call.target
        measured = design if is_own else build_design(spec, call.columns, source.target)
        share = _measured_share(query, source)
        transfer = self._models.transfer(spec, device, call.table.variant, call.target.dtype)
        answered = self._from_series(source.choice, measured, share)
        is_unlike = _is_unlike(source.choice, call)
        for other in source.choices[1:] if not query.framework else ():
            is_open = ~np.isin(answered.provenance, COVERED_PROVENANCES)
            if not is_open.any():
                break
            is_other_unlike = _is_unlike(other, call)
            is_nearer = other.reach.is_nearer(measured, answered.nearest_octaves)
            is_open &= np.where(is_unlike == is_other_unlike, is_nearer, is_unlike)
            # To train a series takes half a second, to look its points up a hundredth.
            if not is_open.any():
                continue
            answer = self._from_series(other, measured, share)
            answered = _take_surer(answered, answer, is_open, is_unlike & ~is_other_unlike)
            is_unlike &= is_other_unlike
        found = lengthen(call, limit_doubt(answered, transfer), source.choice.head.key.variant)
        return found if is_own else move_to_sibling(found, measured.base_us, design.base_us)

    def _complete(self, call: Call, query: LatencyQuery, found: LatencyColumns) -> LatencyColumns:
        """Return a collective's estimates beyond what was measured by what holds for all sizes."""

        def ask(operator: str, columns: Columns) -> LatencyColumns:
            table = replace(call.table, operator=operator, columns=columns)
            return self._estimate(table, query, call.target.device)

        return complete_sizes(call.spec.name, call.columns, found, ask)

    def _from_series(
        self, choice: Choice, design: Design, measured_share: float | None
    ) -> LatencyColumns:
        """Return what a series says; None for the share of measurements that its errors give."""
        model = choice.model
        neighbours = model.reach.index.find(design)
        tiers = model.reach.coverage.tiers(design, neighbours)
        answer = model.regressor.predict(design, tiers)
        is_beyond = is_extrapolated(tiers)
        floor_us = model.min_roofline_ratio * design.roofline_us
        # Beyond what was measured a call takes no less than one that requires less of everything.
        rows = np.flatnonzero(is_beyond)
        floor_us[rows] = np.maximum(floor_us[rows], model.floor.floor_us(design.points[rows]))
        latency_us = np.maximum(design.base_us * np.exp(answer.log_ratio), floor_us)
        bounds = model.calibration.bounds(
            tiers, answer.spread_log, design.base_us, neighbours.distance_octaves
        )
        low_us, high_us = latency_us * np.exp(bounds[0]), latency_us * np.exp(bounds[1])
        provenance = np.where(
            is_beyond, Provenance.EXTRAPOLATED.value, Provenance.INTERPOLATED.value
        )
        rows = np.flatnonzero(neighbours.exact >= 0)
        if not choice.is_other_code and len(rows):
            measured_us = model.series.latency_us[neighbours.exact[rows]]
            share = model.measured_share if measured_share is None else measured_share
            blend_us, bounds_us = _blend(measured_us, latency_us[rows], model.noise_log, share)
            latency_us[rows], (low_us[rows], high_us[rows]) = blend_us, bounds_us
            if not choice.is_other_dtype and not choice.other_framework:
                provenance[rows] = Provenance.MEASURED.value
        if choice.is_other_code:
            provenance[:] = Provenance.EXTRAPOLATED.value
        nearest = neighbours.rows[:, 0]
        doubt_log = answer_doubt_log(choice, latency_us)
        found = widen(pack(latency_us, low_us, high_us, provenance), doubt_log)
        return replace(
            found,
            low_us=np.minimum(np.maximum(found.low_us, floor_us), latency_us),
            nearest={name: column[nearest] for name, column in model.series.columns.items()},
            nearest_us=model.series.latency_us[nearest],
            nearest_octaves=neighbours.distance_octaves,
            basis=choice.basis,
            other_framework=choice.other_framework,
        )

    def _from_proxy(self, call: Call, query: LatencyQuery) -> LatencyColumns | None:
        """Return what an operator says that takes as long; None where that was not measured.

        Asked only where the operator itself was measured nowhere: estimated from other devices it
        errs less. Source: leaving out one of A30, A100 and H100, or of A100 and GH200, norms,
        rotary embeddings and activations estimated from the others err by 7 to 36 %, from a sum of
        two tensors of their own device by 20 to 63 %.
        """
        if call.spec.proxy_operator is None:
            return None
        name, dims = call.spec.proxy_operator(call.columns)
        if not self._can_tell(find_operator(name), call.target, query):
            return None
        num_rows = len(next(iter(call.columns.values())))
        columns = {dim: np.broadcast_to(values, (num_rows,)) for dim, values in dims.items()}
        table = OperatorTable(operator=name, dtype=call.table.dtype, columns=columns)
        found = self._estimate(table, query, call.target.device)
        if (found.provenance == Provenance.ANALYTICAL.value).any():
            return None
        transferred = np.full(len(found.latency_us), Provenance.TRANSFERRED.value)
        estimates = pack(found.latency_us, found.low_us, found.high_us, transferred)
        basis = f"{name}, which takes about as long: {found.basis}"
        return replace(widen(estimates, _PROXY_LOG), basis=basis)

    def _can_tell(self, spec: OperatorSpec, target: Target, query: LatencyQuery) -> bool:
        """Tell whether an operator may have been measured, quicker than by asking for estimates."""
        if spec.proxy_operator is not None:
            return True
        wanted = Wanted(query.framework, preferred=query.preferred_framework)
        if find_source(self._models, spec, target, wanted) is not None:
            return True
        return self._models.transfer(spec, target.device).support.has_measured(spec)

    def _scale_forward(self, call: Call, query: LatencyQuery) -> LatencyColumns:
        """Return a backward pass as the forward calls it is made of, or a multiple of its own."""
        spec, ratio = call.spec, backward_ratio(call)
        if not ratio:
            reason = f"{spec.name} has no backward pass of its own"
            raise InvalidRequestError.of_field("phase", reason)
        parts = spec.backward_calls(call.columns) if spec.backward_calls else (call.columns,)
        scale, doubt_log = (
            (1.0, _FORWARD_CALLS_LOG) if spec.backward_calls else (ratio, _SCALED_BACKWARD_LOG)
        )
        answers = [
            self._estimate(
                replace(call.table, phase=Phase.FORWARD, columns=columns),
                query,
                call.target.device,
            )
            for columns in parts
        ]
        latency_us = scale * np.sum([answer.latency_us for answer in answers], axis=0)
        low_us = scale * np.sum([answer.low_us for answer in answers], axis=0)
        high_us = scale * np.sum([answer.high_us for answer in answers], axis=0)
        provenance = _weakest(
            [answer.provenance for answer in answers], is_whole=not spec.backward_calls
        )
        scaled = widen(pack(latency_us, low_us, high_us, provenance), doubt_log)
        design = build_design(spec, call.columns, call.target)
        scaled = hold_to_bandwidth(call, design, scaled)
        if not is_chain(call.table):
            scaled = hold_to_memory(spec, call.target.device, design, scaled)
        what = "its forward calls" if spec.backward_calls else f"{ratio:g} times forward"
        return replace(scaled, basis=f"{what}: {answers[0].basis}")


def _weakest(provenances: Sequence[IntColumn], *, is_whole: bool) -> IntColumn:
    """Return what a backward pass rests on: its parts' weakest, at most extrapolated.

    Scaled as a whole from the forward pass it is analytical.
    """
    found = np.full(len(provenances[0]), Provenance.EXTRAPOLATED.value)
    for weak in (Provenance.TRANSFERRED.value, Provenance.ANALYTICAL.value):
        found[np.any([column == weak for column in provenances], axis=0)] = weak
    return np.full(len(found), Provenance.ANALYTICAL.value) if is_whole else found


def _measured_share(query: LatencyQuery, source: Source) -> float | None:
    """Return the share of a source's measurements at their points, None for what its errors give.

    Half of what another device's measurement has beyond its neighbours is of that device alone.
    """
    if query.prefer_measured:
        return 1.0
    return None if source.target.device is find_device(query.device) else MOVED_SHARE


def _blend(
    measured_us: FloatColumn, modelled_us: FloatColumn, noise_log: float, share: float
) -> tuple[FloatColumn, _Bounds]:
    """Return the mean in log space, `share` that of the measurement, and bounds around both."""
    # With all the weight on the measurement this is the measurement, to the last bit.
    latency_us = measured_us * (modelled_us / measured_us) ** (1.0 - share)
    low_us = np.minimum(latency_us, measured_us) * np.exp(-noise_log)
    high_us = np.maximum(latency_us, measured_us) * np.exp(noise_log)
    return latency_us, (low_us, high_us)


def _is_unlike(choice: Choice, call: Call) -> _Flags:
    """Return which calls lack a part that all of a series have, or have one that none has.

    How long those take says nothing of them, however small the step in the part's size.
    """
    known = choice.reach.series.columns
    is_unlike = np.zeros(len(call.columns[call.spec.dim_names[0]]), dtype=np.bool_)
    for dim in call.spec.dims:
        if dim.minimum == 0:
            has_part, is_known = call.columns[dim.name] > 0, known[dim.name] > 0
            is_unlike |= ~is_known.any() & has_part | is_known.all() & ~has_part
    return is_unlike


def _take_surer(
    found: LatencyColumns, other: LatencyColumns, is_open: _Flags, is_other_like: _Flags
) -> LatencyColumns:
    """Return the open rows of another answer that it is surer of.

    What alone knows calls like these is surer than what does not.
    """
    is_surer = other.high_us * found.low_us < found.high_us * other.low_us
    takes_other = is_open & (is_surer | is_other_like)
    return choose_rows(~takes_other, found, other, ("nearest to what was asked", "surer"))
