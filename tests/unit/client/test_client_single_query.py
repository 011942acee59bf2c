"""The query for one call: every option reaches it, and its answer comes back whole."""

import dataclasses
import json

import numpy as np

from foretoken.client.single_query import CallOptions, build_single_query
from foretoken.domain import schema
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyReply,
    Phase,
    Provenance,
    pick_estimate,
)


def test_every_option_reaches_the_query() -> None:
    """A new option that were forgotten here would do nothing, silently."""
    options = CallOptions(
        variant="quant=fp8_block",
        kernel="cublas",
        topology="a100_dgx",
        framework="vllm",
        refuse_extrapolation=True,
        model_version="v1",
        prefer_measured=True,
        correction="mine",
    )
    query = build_single_query(
        "gemm", {"m": 1}, device="a30", dtype="FP16", phase="backward", options=options
    )
    (table,) = query.tables
    assert (DType.FP16, Phase.BACKWARD, {"m": [1]}) == (table.dtype, table.phase, table.columns)
    found = {
        field.name: getattr(table if hasattr(table, field.name) else query, field.name)
        for field in dataclasses.fields(options)
    }
    assert dataclasses.asdict(options) == found
    assert all(found.values())


def _reply(nearest_octaves: float) -> LatencyReply:
    columns = LatencyColumns(
        latency_us=np.array([1.0, 3.0]),
        low_us=np.array([0.5, 2.0]),
        high_us=np.array([2.0, 6.0]),
        provenance=np.array([Provenance.MEASURED.value, Provenance.EXTRAPOLATED.value]),
        nearest={"m": np.array([1, 64])},
        nearest_us=np.array([1.0, 2.5]),
        nearest_octaves=np.array([0.0, nearest_octaves]),
        basis="64 points",
        correction_factor=1.5,
    )
    return LatencyReply(model_version="v1", tables=(columns,))


def test_one_row_of_a_reply_is_an_estimate() -> None:
    found = pick_estimate(_reply(1.0), row=1)
    assert (3.0, 2.0, 6.0, Provenance.EXTRAPOLATED, "v1", "64 points") == (
        found.latency_us,
        found.low_us,
        found.high_us,
        found.provenance,
        found.model_version,
        found.basis,
    )
    assert ({"m": 64}, 2.5, 1.0) == (found.nearest, found.nearest_us, found.nearest_octaves)
    assert 2.0 == found.raw_latency_us


def test_what_was_not_measured_has_no_nearest_point() -> None:
    """Infinitely far is no number in JSON."""
    found = pick_estimate(_reply(np.inf), row=1)
    assert ({}, 0.0, 0.0) == (found.nearest, found.nearest_us, found.nearest_octaves)
    json.dumps(schema.encode(found), allow_nan=False)
