"""Answer a query: the measurement where there is one, the model around it, the roofline beyond."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from foretoken.domain.errors import (
    FieldViolation,
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
from foretoken.domain.hardware.topology import TopologySpec, find_topology, topology_of_device
from foretoken.domain.operator import OperatorSpec, find_operator
from foretoken.predictor.coverage import Tier
from foretoken.predictor.features import Design, build_design
from foretoken.predictor.model_set import Choice, ModelSet
from foretoken.predictor.roofline import Columns, FloatColumn, IntColumn, Target
from foretoken.predictor.trainer import MIN_ROOFLINE_RATIO
from foretoken.predictor.transfer import TransferModel

# How far apart two measurements of one point lie where a series cannot tell for itself, and the
# least that is ever claimed. Source: 90th percentile of repeated points, 1.4 to 3.4 %.
_NOISE_LOG, _MIN_NOISE_LOG = 0.034, 0.014
# Further doubt about another software stack's kernels, and about a backward pass scaled from the
# forward pass. Source: versions move attention and MoE by 5 to 97 %, most operators by less.
_OTHER_FRAMEWORK_LOG = float(np.log(1.3))
_SCALED_BACKWARD_LOG = float(np.log(1.5))

# Larger integers are not exact as floats, in which work is computed.
_DIM_MAX = 2**53

_Bounds = tuple[FloatColumn, FloatColumn]


class Estimator:
    """Answers queries from one set of models."""

    def __init__(self, models: ModelSet, measured_weight: float) -> None:
        """Keep the models."""
        self._models = models
        self._measured_weight = measured_weight

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
        tables = tuple(self._estimate(table, query, device) for table in query.tables)
        if query.refuse_extrapolation:
            for table, estimates in zip(query.tables, tables, strict=True):
                _refuse_extrapolation(table, estimates, device)
        return LatencyReply(model_version=self._models.version, tables=tables)

    def _estimate(
        self, table: OperatorTable, query: LatencyQuery, device: DeviceSpec
    ) -> LatencyColumns:
        spec = find_operator(table.operator)
        columns = read_columns(spec, table.columns)
        topology = _find_topology(query.topology, device) if spec.is_collective else None
        if not len(columns[spec.dim_names[0]]):
            empty = np.empty(0)
            return _pack(empty, empty, empty, np.empty(0, dtype=np.int64))
        target = Target(device=device, dtype=table.dtype, phase=table.phase, topology=topology)
        choice = self._models.choose(spec, target, query.framework)
        if choice is not None:
            design = build_design(spec, columns, target)
            analytical = self._models.transfer(spec, device)
            return _limit_doubt(self._from_series(choice, design), analytical)
        if table.phase is Phase.BACKWARD:
            return self._scale_forward(table, query, device)
        transfer = self._models.transfer(spec, device)
        return _from_transfer(transfer, build_design(spec, columns, target))

    def _from_series(self, choice: Choice, design: Design) -> LatencyColumns:
        model = choice.model
        neighbours = model.index.find(design)
        smooth_log = model.regressor.smooth(design)
        log_ratio = smooth_log + neighbours.interpolate(model.regressor.residual_log)
        floor_us = model.min_roofline_ratio * design.roofline_us
        latency_us = np.maximum(design.base_us * np.exp(log_ratio), floor_us)
        tiers = model.coverage.tiers(design, neighbours)
        bounds = model.calibration.bounds(tiers, design.base_us, neighbours.distance_octaves)
        low_us, high_us = latency_us * np.exp(bounds[0]), latency_us * np.exp(bounds[1])
        provenance = np.where(
            tiers == Tier.BEYOND, Provenance.EXTRAPOLATED.value, Provenance.INTERPOLATED.value
        )
        rows = np.flatnonzero(neighbours.exact >= 0)
        if not choice.is_other_framework and len(rows):
            measured_us = model.series.latency_us[neighbours.exact[rows]]
            smooth_us = np.maximum(design.base_us * np.exp(smooth_log), floor_us)[rows]
            blend_us, bounds_us = self._blend(measured_us, smooth_us, model.series.noise_log)
            latency_us[rows], (low_us[rows], high_us[rows]) = blend_us, bounds_us
            if not choice.is_other_dtype:
                provenance[rows] = Provenance.MEASURED.value
        if choice.is_other_framework:
            provenance[:] = Provenance.EXTRAPOLATED.value
            doubt_log = max(_OTHER_FRAMEWORK_LOG, model.series.noise_log)
            low_us *= np.exp(-doubt_log)
            high_us *= np.exp(doubt_log)
        return _pack(latency_us, np.maximum(low_us, floor_us), high_us, provenance)

    def _blend(
        self, measured_us: FloatColumn, modelled_us: FloatColumn, noise_log: float
    ) -> tuple[FloatColumn, _Bounds]:
        """Return measurement and model averaged in log space, and bounds around both.

        One measurement is noisy, and the trees' smooth answer is not. Against another measurement
        of the same point, halves are 3.7 % off on average, the measurement alone 4.0 %.
        """
        weight = self._measured_weight
        latency_us = np.exp(weight * np.log(measured_us) + (1 - weight) * np.log(modelled_us))
        noise = max(noise_log, _MIN_NOISE_LOG) if noise_log else _NOISE_LOG
        low_us = np.minimum(latency_us, measured_us) * np.exp(-noise)
        high_us = np.maximum(latency_us, measured_us) * np.exp(noise)
        return latency_us, (low_us, high_us)

    def _scale_forward(
        self, table: OperatorTable, query: LatencyQuery, device: DeviceSpec
    ) -> LatencyColumns:
        ratio = find_operator(table.operator).work_ratio(table.phase)
        if not ratio:
            reason = f"{table.operator} has no backward pass of its own"
            raise InvalidRequestError.of_field("phase", reason)
        forward_table = OperatorTable(
            operator=table.operator, dtype=table.dtype, columns=table.columns
        )
        forward = self._estimate(forward_table, query, device)
        return _pack(
            forward.latency_us * ratio,
            forward.low_us * ratio * np.exp(-_SCALED_BACKWARD_LOG),
            forward.high_us * ratio * np.exp(_SCALED_BACKWARD_LOG),
            np.full(len(forward.latency_us), Provenance.ANALYTICAL.value),
        )


def _limit_doubt(estimates: LatencyColumns, analytical: TransferModel) -> LatencyColumns:
    """Return the estimates with extrapolated bounds no wider than analytical ones are.

    Doubt grows with the distance to the nearest measurement, but whoever knows measurements is not
    less sure than one who knows none.
    """
    is_beyond = estimates.provenance == Provenance.EXTRAPOLATED.value
    low_us = estimates.latency_us * np.exp(analytical.low_log)
    high_us = estimates.latency_us * np.exp(analytical.high_log)
    return _pack(
        estimates.latency_us,
        np.where(is_beyond, np.maximum(estimates.low_us, low_us), estimates.low_us),
        np.where(is_beyond, np.minimum(estimates.high_us, high_us), estimates.high_us),
        estimates.provenance,
    )


def _from_transfer(transfer: TransferModel, design: Design) -> LatencyColumns:
    floor_us = MIN_ROOFLINE_RATIO * design.roofline_us
    latency_us = np.maximum(design.base_us * np.exp(transfer.predict(design)), floor_us)
    low_us = np.maximum(latency_us * np.exp(transfer.low_log), floor_us)
    high_us = latency_us * np.exp(transfer.high_log)
    provenance = np.full(design.num_rows, Provenance.ANALYTICAL.value)
    return _pack(latency_us, low_us, high_us, provenance)


def read_columns(spec: OperatorSpec, given: Mapping[str, object]) -> Columns:
    """Return the columns as integers.

    Raises:
        InvalidRequestError: one violation per missing, unknown, ragged or illegal column.

    """
    violations = [
        FieldViolation(name, f"{spec.name} has no such dimension; it has {spec.dim_names}")
        for name in given
        if name not in spec.dim_names
    ]
    columns: dict[str, IntColumn] = {}
    for dim in spec.dims:
        if dim.name not in given:
            violations.append(FieldViolation(dim.name, f"missing ({dim.meaning})"))
            continue
        column = np.atleast_1d(np.asarray(given[dim.name]))
        reason = _reject(column, dim.minimum)
        if reason:
            violations.append(FieldViolation(dim.name, reason))
        else:
            columns[dim.name] = column.astype(np.int64)
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        violations.append(FieldViolation("columns", f"lengths differ: {sorted(lengths)}"))
    if violations:
        raise InvalidRequestError.of_violations(violations, spec.name)
    return columns


def _reject(column: npt.NDArray[np.generic], minimum: int) -> str:
    if column.ndim != 1 or column.dtype.kind not in "iuf":
        return "must be a column of integers" if column.size else ""
    if column.dtype.kind == "f" and not (column == np.floor(column)).all():
        return "must be a column of integers"
    if column.size and column.min() < minimum:
        return f"must be at least {minimum}"
    if column.size and column.max() > _DIM_MAX:
        return f"must be at most {_DIM_MAX}"
    return ""


def _find_topology(name: str, device: DeviceSpec) -> TopologySpec:
    return find_topology(name) if name else topology_of_device(device.name)


def _refuse_extrapolation(
    table: OperatorTable, estimates: LatencyColumns, device: DeviceSpec
) -> None:
    is_outside = estimates.provenance >= Provenance.EXTRAPOLATED.value
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
    return LatencyColumns(
        latency_us=latency_us,
        low_us=np.minimum(low_us, latency_us),
        high_us=np.maximum(high_us, latency_us),
        provenance=provenance.astype(np.int64),
    )
