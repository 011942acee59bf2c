"""Refuse a question that nothing could answer truly, whatever was measured."""

from collections.abc import Collection

import numpy as np

from foretoken.domain.errors import InvalidRequestError, OutOfCoverageError, UnknownPluginError
from foretoken.domain.hardware.device import DeviceSpec, check_format, find_device
from foretoken.domain.hardware.topology import TopologySpec
from foretoken.domain.measurements.estimate import (
    COVERED_PROVENANCES,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
)
from foretoken.domain.models.quantization import Quantization, all_quantizations
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.variant import parse_variant, stored_dtype, stored_schemes
from foretoken.predictor.roofline import Columns
from foretoken.predictor.series import SeriesKey

# Groups of operators that multiply matrices; others move values of any format.
_MULTIPLYING = frozenset({"gemm", "attention", "moe", "lora"})
# What of a variant names the format of weights, and of the KV cache.
_FORMATS = ("quant", "kv")


def check_query(query: LatencyQuery, known: Collection[SeriesKey]) -> None:
    """Refuse formats that the device cannot multiply in, and schemes that are none.

    A scheme is one that is described, or that the catalog's own series have (`known`). One that
    says the format of the activations, too, has no other.

    Raises:
        InvalidRequestError: the device lacks the format, or the scheme has another one.
        UnknownDeviceError, UnknownOperatorError, UnknownPluginError: no such name.

    """
    device = find_device(query.device)
    for table in query.tables:
        if find_operator(table.operator).group in _MULTIPLYING:
            check_format("dtype", table.dtype, device)
        _check_schemes(table, known)
        _check_activations(table, known, device)


def check_group(columns: Columns, topology: TopologySpec | None) -> None:
    """Refuse a collective of more devices on a node than the topology's nodes have.

    Raises:
        InvalidRequestError: a row requires more.

    """
    most = int(columns["devices_per_node"].max())
    if topology is not None and most > topology.devices_per_node:
        raise InvalidRequestError.of_field(
            "devices_per_node",
            f"{most} is more than the {topology.devices_per_node} of a node of {topology.name}:"
            " spread the ranks over num_nodes, or name another topology",
        )


def _check_activations(
    table: OperatorTable, known: Collection[SeriesKey], device: DeviceSpec
) -> None:
    """Refuse a scheme of weights whose activations have another format than was asked about."""
    scheme = parse_variant(table.variant).get("quant", "")
    formats = all_quantizations().get(scheme, Quantization()).dtypes
    if not formats or table.dtype in formats:
        return
    check_format("variant.quant", formats[0], device)
    measured = {
        series.target.dtype
        for series in known
        if parse_variant(series.variant).get("quant", "") == scheme
    }
    if table.dtype not in measured:
        asked, own = (dtype.name.lower() for dtype in (table.dtype, formats[0]))
        raise InvalidRequestError.of_field(
            "variant.quant", f"{scheme} multiplies in {own}, not in {asked}: ask for dtype={own}"
        )


def _check_schemes(table: OperatorTable, known: Collection[SeriesKey]) -> None:
    facts = parse_variant(table.variant)
    for key in _FORMATS:
        scheme = facts.get(key, "")
        if not scheme or stored_dtype(scheme) is not None or scheme in all_quantizations():
            continue
        measured = {parse_variant(series.variant).get(key, "") for series in known}
        if scheme not in measured:
            names = {*stored_schemes(), *all_quantizations(), *measured} - {""}
            raise UnknownPluginError.named(scheme, names, f"variant.{key}", "format")


def refuse_extrapolation(
    table: OperatorTable, estimates: LatencyColumns, device: DeviceSpec
) -> None:
    """Refuse estimates that measurements of the device itself do not surround.

    Raises:
        OutOfCoverageError: there are some; the message has the first.

    """
    is_outside = ~np.isin(estimates.provenance, COVERED_PROVENANCES)
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
