"""Estimates given before are given again, and no others."""

from dataclasses import replace

import numpy as np
import pytest

from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Phase,
)
from foretoken.predictor.estimate_cache import EstimateCache, cache_key

_TABLE = OperatorTable(operator="gemm", dtype=DType.FP16, columns={"m": [1, 2], "n": [3, 4]})
_QUERY = LatencyQuery(device="a30", tables=(_TABLE,))


class Counters:
    """Hits and misses."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def observe(self, *, is_hit: bool) -> None:
        self.seen.append(is_hit)


def _columns(num_rows: int) -> LatencyColumns:
    def zeros() -> np.ndarray:
        return np.zeros(num_rows)

    return LatencyColumns(
        latency_us=zeros(),
        low_us=zeros(),
        high_us=zeros(),
        provenance=zeros(),
        nearest={"m": zeros()},
        nearest_us=zeros(),
        nearest_octaves=zeros(),
    )


def test_what_was_kept_is_found_and_counted() -> None:
    counters = Counters()
    cache, kept = EstimateCache(100, counters.observe), _columns(2)
    assert cache.find(b"a") is None
    cache.keep(b"a", kept)
    assert cache.find(b"a") is kept
    assert [False, True] == counters.seen


def test_nobody_can_write_into_what_is_kept() -> None:
    cache, kept = EstimateCache(100, Counters().observe), _columns(2)
    cache.keep(b"a", kept)
    for column in (kept.latency_us, kept.nearest_octaves, kept.nearest["m"]):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1.0


def test_the_least_recently_asked_goes_first() -> None:
    cache = EstimateCache(100, Counters().observe)
    for key in (b"a", b"b", b"c"):
        cache.keep(key, _columns(5))
    cache.find(b"a")
    cache.keep(b"d", _columns(5))
    assert [True, False, True, True] == [
        cache.find(key) is not None for key in (b"a", b"b", b"c", b"d")
    ]


@pytest.mark.parametrize(("max_rows", "num_rows"), [(0, 0), (0, 1), (100, 100)])
def test_more_than_there_is_room_for_is_not_kept(max_rows: int, num_rows: int) -> None:
    cache = EstimateCache(max_rows, Counters().observe)
    cache.keep(b"a", _columns(num_rows))
    assert cache.find(b"a") is None


def test_empty_tables_do_not_pile_up() -> None:
    cache = EstimateCache(100, Counters().observe)
    keys = [bytes([number]) for number in range(50)]
    for key in keys:
        cache.keep(key, _columns(0))
    assert 3 == sum(cache.find(key) is not None for key in keys)


@pytest.mark.parametrize(
    ("version", "query", "table"),
    [
        ("v2", _QUERY, _TABLE),
        ("v1", replace(_QUERY, device="h100_sxm"), _TABLE),
        ("v1", replace(_QUERY, topology="a100_dgx"), _TABLE),
        ("v1", replace(_QUERY, framework="vllm"), _TABLE),
        ("v1", replace(_QUERY, prefer_measured=True), _TABLE),
        ("v1", _QUERY, replace(_TABLE, operator="rms_norm")),
        ("v1", _QUERY, replace(_TABLE, dtype=DType.BF16)),
        ("v1", _QUERY, replace(_TABLE, phase=Phase.BACKWARD)),
        ("v1", _QUERY, replace(_TABLE, variant="quant=fp8_block")),
        ("v1", _QUERY, replace(_TABLE, kernel="flashinfer")),
        ("v1", _QUERY, replace(_TABLE, columns={"m": [3, 4], "n": [1, 2]})),
        ("v1", _QUERY, replace(_TABLE, columns={"m": [1], "n": [2, 3, 4]})),
        ("v1", _QUERY, replace(_TABLE, columns={"m": [1.0, 2.0], "n": [3, 4]})),
    ],
)
def test_another_question_has_another_key(
    version: str, query: LatencyQuery, table: OperatorTable
) -> None:
    assert cache_key("v1", _QUERY, _TABLE) != cache_key(version, query, table)


def test_the_same_question_in_other_arrays_has_the_same_key() -> None:
    """Nor does it matter whether the answer may be refused or will be corrected."""
    table = replace(_TABLE, columns={"n": np.array([3, 0, 4])[::2], "m": np.array([1, 2])})
    query = replace(_QUERY, tables=(), refuse_extrapolation=True, correction="mine")
    assert cache_key("v1", _QUERY, _TABLE) == cache_key("v1", query, table)
