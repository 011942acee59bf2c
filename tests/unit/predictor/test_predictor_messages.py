"""Collectives of sizes nobody measured follow sizes and collectives that were."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from predictor_fakes import MakePredictor, Rows, Train, base_us, columns_of, row_of

from foretoken.domain.measurements.estimate import DType, LatencyQuery, OperatorTable
from foretoken.predictor.service import PredictorService

_PLACE = {"device": "a100_sxm_80", "topology": "a100_dgx"}
_LARGEST = 2**28


def _dims(message_bytes: int, devices_per_node: int = 8) -> dict[str, int]:
    return {
        "message_bytes": message_bytes,
        "devices_per_node": devices_per_node,
        "num_nodes": 1,
    }


def _rows(operator: str, exponents: Sequence[int], slowdown: float = 1.25) -> Rows:
    rows: list[dict[str, Any]] = []
    for exponent in exponents:
        for devices_per_node in (2, 8):
            dims = _dims(2**exponent, devices_per_node)
            latency_us = base_us(operator, dims, **_PLACE) * slowdown
            rows.append(row_of(operator, dims, latency_us, **_PLACE))
    return rows


def _ask(
    service: PredictorService, operator: str, dims: Mapping[str, int], variant: str = ""
) -> float:
    table = OperatorTable(
        operator=operator, dtype=DType.FP16, columns=columns_of(dims), variant=variant
    )
    reply = service.predict(LatencyQuery(tables=(table,), **_PLACE))
    return float(reply.tables[0].latency_us[0])


def test_beyond_the_largest_message_time_keeps_its_rate(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(_rows("all_reduce", range(10, 29)))
    train(service)
    near = _ask(service, "all_reduce", _dims(round(0.9 * _LARGEST)))
    for factor in (2, 4, 8):
        found = _ask(service, "all_reduce", _dims(factor * _LARGEST))
        assert np.isclose(found, near * factor / 0.9, rtol=1e-3)


def test_the_rate_kept_is_that_of_the_variant_asked_for(
    make_predictor: MakePredictor, train: Train
) -> None:
    slow = [{**row, "variant": "mode=slow"} for row in _rows("all_reduce", range(10, 29), 5.0)]
    fast = _rows("all_reduce", range(10, 29))
    alone, both = make_predictor(fast), make_predictor([*fast, *slow])
    for service in (alone, both):
        train(service)
    beyond = _dims(4 * _LARGEST)
    assert _ask(alone, "all_reduce", beyond) == _ask(both, "all_reduce", beyond)
    near = _ask(both, "all_reduce", _dims(round(0.9 * _LARGEST)), "mode=slow")
    assert _ask(both, "all_reduce", beyond, "mode=slow") >= 0.999 * near * 4 / 0.9


def test_a_gather_far_from_its_measurements_is_a_part_of_the_all_reduce(
    make_predictor: MakePredictor, train: Train
) -> None:
    """Large gathers were measured, all-reduces of every size."""
    rows = [*_rows("all_reduce", range(10, 31)), *_rows("all_gather", range(28, 31), 1.5)]
    service = make_predictor(rows)
    train(service)
    for exponent in (16, 20, 24):
        gather = _ask(service, "all_gather", _dims(2**exponent))
        whole = _ask(service, "all_reduce", _dims(2**exponent))
        assert 0.5 * whole <= gather <= whole


def test_a_measured_gather_is_its_own(make_predictor: MakePredictor, train: Train) -> None:
    alone = make_predictor(_rows("all_gather", range(20, 31)))
    train(alone)
    expected = _ask(alone, "all_gather", _dims(2**24))
    both = make_predictor(
        [*_rows("all_reduce", range(10, 31)), *_rows("all_gather", range(20, 31))]
    )
    train(both)
    np.testing.assert_allclose(_ask(both, "all_gather", _dims(2**24)), expected, rtol=0.02)
