"""Collectives inside a node whose links were measured on other devices of the same chip."""

from typing import Any

import numpy as np
import pytest
from predictor_fakes import MakePredictor, Rows, Train, base_us, row_of

from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Provenance,
    pick_estimate,
)
from foretoken.predictor.service import PredictorService
from foretoken.predictor.transfer.siblings import find_linked_alike

_H100 = {"device": "h100_sxm", "topology": "h100_dgx"}
_H200 = {"device": "h200_sxm", "topology": "h200_hgx"}
_A100 = {"device": "a100_sxm_80", "topology": "a100_dgx"}


def _rows(place: dict[str, str], slowdown: float, operator: str = "all_gather") -> Rows:
    rows: list[dict[str, Any]] = []
    for exponent in range(10, 29):
        for devices_per_node in (2, 8):
            dims = {
                "message_bytes": 2**exponent,
                "devices_per_node": devices_per_node,
                "num_nodes": 1,
            }
            latency_us = base_us(operator, dims, **place) * slowdown
            rows.append(row_of(operator, dims, latency_us, **place))
    return rows


def _query(place: dict[str, str], *groups: tuple[int, int]) -> LatencyQuery:
    columns = {
        "message_bytes": np.full(len(groups), 2**24),
        "devices_per_node": np.array([devices for devices, _ in groups]),
        "num_nodes": np.array([nodes for _, nodes in groups]),
    }
    table = OperatorTable(operator="all_gather", dtype=DType.BF16, columns=columns)
    return LatencyQuery(device=place["device"], topology=place["topology"], tables=(table,))


def _ask(
    service: PredictorService, place: dict[str, str], *groups: tuple[int, int]
) -> LatencyColumns:
    return service.predict(_query(place, *groups)).tables[0]


@pytest.mark.parametrize(
    ("topology", "alike"),
    [
        ("h100_dgx", ("h100_roce_2x", "h200_hgx")),
        ("h200_hgx", ("h100_dgx", "h100_roce_2x")),
        # Its links are half as fast.
        ("h800_hgx", ()),
        ("b300_hgx", ("b200_hgx",)),
        ("mi325x_platform", ("mi300x_platform",)),
        # One domain of 72 devices is no node of eight.
        ("gb200_nvl72", ("gb300_nvl72",)),
    ],
)
def test_alike_are_as_many_of_the_same_chip_on_the_same_links(
    topology: str, alike: tuple[str, ...]
) -> None:
    found = find_linked_alike(find_topology(topology))
    assert alike == tuple(other.name for other in found)


def test_a_node_answers_as_one_that_is_linked_alike(
    make_predictor: MakePredictor, train: Train
) -> None:
    """Not as the A100, whose collectives reach less of its links; and more uncertain."""
    service = make_predictor([*_rows(_H200, 1.2), *_rows(_A100, 3.0)])
    train(service)
    own, other = _ask(service, _H200, (8, 1)), _ask(service, _H100, (8, 1))
    assert own.latency_us == pytest.approx(other.latency_us)
    assert other.low_us < own.low_us
    assert own.high_us < other.high_us
    assert [Provenance.TRANSFERRED.value] == other.provenance.tolist()
    assert "h200_hgx" in other.basis


def test_what_was_measured_on_the_node_itself_comes_first(
    make_predictor: MakePredictor, train: Train
) -> None:
    alone = make_predictor(_rows(_H100, 2.0))
    both = make_predictor([*_rows(_H100, 2.0), *_rows(_H200, 1.2)])
    for service in (alone, both):
        train(service)
    found = _ask(both, _H100, (8, 1))
    assert _ask(alone, _H100, (8, 1)).latency_us == pytest.approx(found.latency_us, rel=0.02)
    assert [Provenance.MEASURED.value] == found.provenance.tolist()


def test_between_nodes_nothing_is_taken_from_links_inside(
    make_predictor: MakePredictor, train: Train
) -> None:
    """Asked together, each row is what it is alone."""
    service = make_predictor(_rows(_H200, 1.2))
    train(service)
    together = _ask(service, _H100, (8, 1), (8, 2))
    inside, between = _ask(service, _H100, (8, 1)), _ask(service, _H100, (8, 2))
    assert [inside.latency_us[0], between.latency_us[0]] == together.latency_us.tolist()


def test_an_explanation_shows_the_points_that_were_used(
    make_predictor: MakePredictor, train: Train
) -> None:
    service = make_predictor(_rows(_H200, 1.2))
    train(service)
    query = _query(_H100, (8, 1))
    found = service.explain(query)
    assert pick_estimate(service.predict(query)) == found.estimate
    assert found.neighbours[0].dims["message_bytes"] == 2**24
