"""Answer a query: the measurement where there is one, the model around it, the roofline beyond."""

from dataclasses import replace

import numpy as np

from foretoken.domain.errors import (
    InvalidRequestError,
    NotTrainedError,
    OutOfCoverageError,
)
from foretoken.domain.estimate import (
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
    Phase,
    Provenance,
)
from foretoken.domain.hardware.device import DeviceSpec, find_device
from foretoken.domain.operator import OperatorSpec, find_operator
from foretoken.predictor.estimate_cache import EstimateCache, cache_key
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.honesty.coverage import is_extrapolated
from foretoken.predictor.model_set import Choice, ModelSet, Wanted
from foretoken.predictor.query_columns import read_columns
from foretoken.predictor.query_target import find_target
from foretoken.predictor.roofline import FloatColumn, IntColumn
from foretoken.predictor.trainer import MIN_ROOFLINE_RATIO
from foretoken.predictor.transfer import TransferModel

# How far apart two measurements of one point lie where a series cannot tell for itself, and the
# least that is ever claimed. Source: 90th percentile of repeated points, 1.4 to 3.4 %.
_NOISE_LOG, _MIN_NOISE_LOG = 0.034, 0.014
# Further doubt about the times of another software stack, kernel or variant, and about a backward
# pass scaled from the forward pass. Source: versions move attention and MoE by 5 to 97 %, most
# operators by less.
_OTHER_CODE_LOG = float(np.log(1.3))
_SCALED_BACKWARD_LOG = float(np.log(1.5))

_COVERED = [member.value for member in Provenance if member.is_covered]

_Bounds = tuple[FloatColumn, FloatColumn]


class Estimator:
    """Answers queries from one set of models."""

    def __init__(
        self, models: ModelSet, measured_weight: float, cache: EstimateCache | None = None
    ) -> None:
        """Keep the models, and what remembers their estimates."""
        self._models = models
        self._measured_weight = measured_weight
        self._cache = cache

    def predict(self, query: LatencyQuery) -> LatencyReply:
        """Return the estimates of all tables.

        Raises:
            UnknownDeviceError, UnknownTopologyError, UnknownOperatorError: no file of that name.
            InvalidRequestError: columns that are not the operator's dimensions.
            NotTrainedError, OutOfCoverageError: extrapolation is refused and would be needed.

        """
        if query.refuse_extrapolation and not self._models.series:
            raise NotTrainedError("no latency model is trained; run a training first")
        device = find_device(query.device)
        tables = tuple(self._recall(table, query, device) for table in query.tables)
        if query.refuse_extrapolation:
            for table, estimates in zip(query.tables, tables, strict=True):
                _refuse_extrapolation(table, estimates, device)
        return LatencyReply(model_version=self._models.version, tables=tables)

    def _recall(
        self, table: OperatorTable, query: LatencyQuery, device: DeviceSpec
    ) -> LatencyColumns:
        if self._cache is None:
            return self._estimate(table, query, device)
        key = cache_key(self._models.version, query, table)
        estimates = self._cache.find(key)
        if estimates is None:
            estimates = self._estimate(table, query, device)
            self._cache.keep(key, estimates)
        return estimates

    def _estimate(
        self, table: OperatorTable, query: LatencyQuery, device: DeviceSpec
    ) -> LatencyColumns:
        spec = find_operator(table.operator)
        columns = read_columns(spec, table.columns)
        if not len(columns[spec.dim_names[0]]):
            empty = np.empty(0)
            return _pack(empty, empty, empty, np.empty(0, dtype=np.int64))
        target = find_target(spec, device.name, query.topology, table.dtype, table.phase)
        wanted = Wanted(query.framework, table.variant, table.kernel)
        choice = self._models.choose(spec, target, wanted)
        if choice is not None:
            design = build_design(spec, columns, target)
            weight = 1.0 if query.prefer_measured else self._measured_weight
            transfer = self._models.transfer(spec, device, table.variant)
            return _limit_doubt(self._from_series(choice, design, weight), transfer)
        if table.phase is Phase.BACKWARD:
            return self._scale_forward(table, query, device)
        transfer = self._models.transfer(spec, device, table.variant)
        return _from_transfer(transfer, spec, device, build_design(spec, columns, target))

    def _from_series(
        self, choice: Choice, design: Design, measured_weight: float
    ) -> LatencyColumns:
        model = choice.model
        neighbours = model.index.find(design)
        tiers = model.coverage.tiers(design, neighbours)
        answer = model.regressor.predict(design, tiers)
        is_beyond = is_extrapolated(tiers)
        floor_us = model.min_roofline_ratio * design.roofline_us
        # Beyond what was measured a call takes no less than one that asks less of everything.
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
            noise_log = model.series.noise_log
            blend_us, bounds_us = _blend(measured_us, latency_us[rows], noise_log, measured_weight)
            latency_us[rows], (low_us[rows], high_us[rows]) = blend_us, bounds_us
            if not choice.is_other_dtype:
                provenance[rows] = Provenance.MEASURED.value
        if choice.is_other_code:
            provenance[:] = Provenance.EXTRAPOLATED.value
            doubt_log = max(_OTHER_CODE_LOG, model.series.noise_log)
            low_us *= np.exp(-doubt_log)
            high_us *= np.exp(doubt_log)
        nearest = neighbours.rows[:, 0]
        return replace(
            _pack(latency_us, np.maximum(low_us, floor_us), high_us, provenance),
            nearest={name: column[nearest] for name, column in model.series.columns.items()},
            nearest_us=model.series.latency_us[nearest],
            nearest_octaves=neighbours.distance_octaves,
            basis=choice.basis,
        )

    def _scale_forward(
        self, table: OperatorTable, query: LatencyQuery, device: DeviceSpec
    ) -> LatencyColumns:
        ratio = find_operator(table.operator).work_ratio(table.phase)
        if not ratio:
            reason = f"{table.operator} has no backward pass of its own"
            raise InvalidRequestError.of_field("phase", reason)
        forward_table = OperatorTable(
            operator=table.operator,
            dtype=table.dtype,
            columns=table.columns,
            variant=table.variant,
            kernel=table.kernel,
        )
        forward = self._estimate(forward_table, query, device)
        scaled = _pack(
            forward.latency_us * ratio,
            forward.low_us * ratio * np.exp(-_SCALED_BACKWARD_LOG),
            forward.high_us * ratio * np.exp(_SCALED_BACKWARD_LOG),
            np.full(len(forward.latency_us), Provenance.ANALYTICAL.value),
        )
        return replace(scaled, basis=f"{ratio:g} times forward: {forward.basis}")


def _blend(
    measured_us: FloatColumn, modelled_us: FloatColumn, noise_log: float, weight: float
) -> tuple[FloatColumn, _Bounds]:
    """Return measurement and model averaged in log space, and bounds around both.

    One measurement is noisy, and the model's smooth answer is not. Against another measurement
    of the same point, halves are 3.7 % off on average, the measurement alone 4.0 %.
    """
    latency_us = np.exp(weight * np.log(measured_us) + (1 - weight) * np.log(modelled_us))
    noise = max(noise_log, _MIN_NOISE_LOG) if noise_log else _NOISE_LOG
    low_us = np.minimum(latency_us, measured_us) * np.exp(-noise)
    high_us = np.maximum(latency_us, measured_us) * np.exp(noise)
    return latency_us, (low_us, high_us)


def _limit_doubt(estimates: LatencyColumns, transfer: TransferModel) -> LatencyColumns:
    """Return the estimates with extrapolated bounds no wider than transferred ones are.

    Doubt grows with the distance to the nearest measurement, but whoever knows measurements is not
    less sure than one who knows none.
    """
    is_beyond = estimates.provenance == Provenance.EXTRAPOLATED.value
    low_us = estimates.latency_us * np.exp(transfer.low_log)
    high_us = estimates.latency_us * np.exp(transfer.high_log)
    return replace(
        estimates,
        low_us=np.where(is_beyond, np.maximum(estimates.low_us, low_us), estimates.low_us),
        high_us=np.where(is_beyond, np.minimum(estimates.high_us, high_us), estimates.high_us),
    )


def _from_transfer(
    transfer: TransferModel, spec: OperatorSpec, device: DeviceSpec, design: Design
) -> LatencyColumns:
    grounds = transfer.grounds
    provenance = (
        Provenance.TRANSFERRED if grounds.has_measured(spec) else Provenance.ANALYTICAL
    ).value
    floor_us = MIN_ROOFLINE_RATIO * design.roofline_us
    latency_us = np.maximum(design.base_us * np.exp(transfer.predict(design)), floor_us)
    low_us = np.maximum(latency_us * np.exp(transfer.low_log), floor_us)
    high_us = latency_us * np.exp(transfer.high_log)
    estimates = _pack(latency_us, low_us, high_us, np.full(design.num_rows, provenance))
    return replace(estimates, basis=grounds.describe(spec, device))


def _refuse_extrapolation(
    table: OperatorTable, estimates: LatencyColumns, device: DeviceSpec
) -> None:
    is_outside = ~np.isin(estimates.provenance, _COVERED)
    if is_outside.any():
        row = int(np.flatnonzero(is_outside)[0])
        dims = ", ".join(f"{name}={column[row]}" for name, column in table.columns.items())
        raise OutOfCoverageError(
            f"{int(is_outside.sum())} of {len(is_outside)} calls of {table.operator} are outside "
            f"what was measured on {device.name}, first row {row}: {dims}; profile there, or "
            f"allow extrapolation",
            operator=table.operator,
            device=device.name,
            row=str(row),
        )


def _pack(
    latency_us: FloatColumn, low_us: FloatColumn, high_us: FloatColumn, provenance: IntColumn
) -> LatencyColumns:
    """Return estimates that no measured point is near to."""
    return LatencyColumns(
        latency_us=latency_us,
        low_us=np.minimum(low_us, latency_us),
        high_us=np.maximum(high_us, latency_us),
        provenance=provenance.astype(np.int64),
        nearest_us=np.zeros(len(latency_us)),
        nearest_octaves=np.full(len(latency_us), np.inf),
    )
