"""Refuse a question that nothing could answer truly, whatever was measured."""

from collections.abc import Collection

from foretoken.domain.errors import UnknownPluginError
from foretoken.domain.hardware.device import check_format, find_device
from foretoken.domain.measurements.estimate import LatencyQuery, OperatorTable
from foretoken.domain.models.quantization import all_quantizations
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.variant import parse_variant, stored_dtype, stored_schemes
from foretoken.predictor.training_rows import SeriesKey

# Groups of operators that multiply matrices; others move values of any format.
_MULTIPLYING = frozenset({"gemm", "attention", "moe", "lora"})
# What of a variant names the format of weights, and of the KV cache.
_FORMATS = ("quant", "kv")


def check_query(query: LatencyQuery, known: Collection[SeriesKey]) -> None:
    """Refuse formats that the device cannot multiply in, and schemes that are none.

    A scheme is one that is described, or that the catalog's own series have (`known`).

    Raises:
        InvalidRequestError: the device lacks the format.
        UnknownDeviceError, UnknownOperatorError, UnknownPluginError: no such name.

    """
    device = find_device(query.device)
    for table in query.tables:
        if find_operator(table.operator).group in _MULTIPLYING:
            check_format("dtype", table.dtype, device)
        _check_schemes(table, known)


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
