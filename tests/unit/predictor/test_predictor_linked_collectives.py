"""Collectives on links where they were not measured themselves, held to what links carry."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predictor_fakes import MakePredictor, Rows, Train, base_us, row_of

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import all_topologies, find_topology
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Provenance,
)
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.features import build_design
from foretoken.predictor.roofline import Columns, Target
from foretoken.predictor.service import PredictorService
from foretoken.predictor.transfer.link_band import hold_to_links, link_band

_PCIE = {"device": "rtx_4090", "topology": "rtx_4090_pcie"}
_OTHER_PCIE = {"device": "rtx_pro_6000", "topology": "rtx_pro_6000_pcie"}
_H100 = {"device": "h100_sxm", "topology": "h100_dgx"}
_H200 = {"device": "h200_sxm", "topology": "h200_hgx"}
_LARGE = 2**28


def _rows(operator: str, place: dict[str, str], slowdown: float, num_nodes: int = 1) -> Rows:
    rows: list[dict[str, Any]] = []
    for exponent in range(10, 29):
        dims = {"message_bytes": 2**exponent, "devices_per_node": 2, "num_nodes": num_nodes}
        rows.append(row_of(operator, dims, base_us(operator, dims, **place) * slowdown, **place))
    return rows


def _ask(
    service: PredictorService,
    operator: str,
    place: dict[str, str],
    *calls: tuple[int, int, int],
) -> LatencyColumns:
    table = OperatorTable(operator=operator, dtype=DType.BF16, columns=_columns(calls))
    query = LatencyQuery(device=place["device"], topology=place["topology"], tables=(table,))
    return service.predict(query).tables[0]


def _columns(calls: Sequence[tuple[int, int, int]]) -> Columns:
    names = ("message_bytes", "devices_per_node", "num_nodes")
    return dict(zip(names, np.array(calls).T, strict=True))


def _wire_us(operator: str, place: dict[str, str], *calls: tuple[int, int, int]) -> np.ndarray:
    topology = find_topology(place["topology"])
    target = Target(device=find_device(place["device"]), dtype=DType.BF16, topology=topology)
    return build_design(find_operator(operator), _columns(calls), target).roofline_us


@pytest.mark.parametrize("asked", ["all_gather", "all_to_all", "all_reduce", "send_recv"])
def test_one_collective_measured_corrects_the_links_of_all(
    make_predictor: MakePredictor, train: Train, asked: str
) -> None:
    """A host whose links give half of their rate to one gives no more to others."""
    measured = "reduce_scatter"
    elsewhere = [row for op in (asked, measured) for row in _rows(op, _OTHER_PCIE, 1.1)]
    service = make_predictor([*_rows(measured, _PCIE, 2.1), *elsewhere])
    train(service)
    call = (_LARGE, 2, 1)
    found = _ask(service, asked, _PCIE, call)
    assert Provenance.TRANSFERRED.value == found.provenance[0]
    assert "what reduce_scatter reaches of the same links" in found.basis
    assert pytest.approx(2.1, rel=0.1) == found.latency_us[0] / _wire_us(asked, _PCIE, call)[0]
    assert found.low_us[0] < found.latency_us[0] < found.high_us[0]


def test_links_between_nodes_are_told_by_what_crossed_them(
    make_predictor: MakePredictor, train: Train
) -> None:
    """An all-gather measured inside a node says less of the network than a transfer over it."""
    inside, across = _rows("all_gather", _H100, 1.2), _rows("send_recv", _H100, 1.5, num_nodes=2)
    service = make_predictor([*inside, *across])
    train(service)
    calls = [(_LARGE, 2, 1), (_LARGE, 2, 2), (_LARGE, 8, 48)]
    found = _ask(service, "all_gather", _H100, *calls)
    ratio = found.latency_us / _wire_us("all_gather", _H100, *calls)
    assert pytest.approx([1.2, 1.5, 1.5], rel=0.1) == ratio.tolist()
    assert "what send_recv reaches of the same links" in found.basis


def test_links_that_the_nearest_software_did_not_cross_are_estimated_from_what_did(
    make_predictor: MakePredictor, train: Train
) -> None:
    """The same collective of an older release is nearer than what documents say of the links."""
    rows = [
        {**row, "framework": "sglang", "framework_version": version}
        for version, num_nodes, slowdown in (("0.5.12", 1, 1.2), ("0.5.0", 2, 1.6))
        for row in _rows("all_to_all", _H200, slowdown, num_nodes)
    ]
    service = make_predictor(rows)
    train(service)
    calls = [(_LARGE, 2, 1), (_LARGE, 2, 2)]
    table = OperatorTable(operator="all_to_all", dtype=DType.BF16, columns=_columns(calls))
    query = LatencyQuery(**_H200, tables=(table,), preferred_framework="sglang 0.5.20")
    found = service.predict(query).tables[0]
    ratio = found.latency_us / _wire_us("all_to_all", _H200, *calls)
    assert pytest.approx([1.2, 1.6], rel=0.1) == ratio.tolist()
    assert "sglang 0.5.0" in found.basis


def test_nodes_linked_alike_are_corrected_where_own_links_are_slower(
    make_predictor: MakePredictor, train: Train
) -> None:
    gathers = _rows("all_gather", _H100, 1.2)
    reduces = _rows("all_reduce", _H100, 1.2)
    call = (_LARGE, 2, 1)
    for slowdown, expected in ((1.25, 1.2), (2.4, 2.4)):
        own = _rows("all_reduce", _H200, slowdown)
        service = make_predictor([*gathers, *reduces, *own])
        train(service)
        found = _ask(service, "all_gather", _H200, call)
        assert "linked alike" in found.basis
        ratio = found.latency_us[0] / _wire_us("all_gather", _H200, call)[0]
        assert pytest.approx(expected, rel=0.05) == ratio


def test_links_slower_than_their_file_says_tell_nothing_of_others(
    make_predictor: MakePredictor, train: Train
) -> None:
    """One cluster's broken network made everybody's large messages 19 times too slow."""
    broken = {"device": "a100_sxm_80", "topology": "a100_perlmutter"}
    rows = [
        *_rows("all_gather", _H100, 1.3, num_nodes=2),
        *_rows("all_gather", broken, 20.0, num_nodes=2),
    ]
    service = make_predictor(rows)
    train(service)
    calls = [(2**exponent, 1, 48) for exponent in (28, 30, 32)]
    place = {"device": "h20", "topology": "h20_hgx"}
    found = _ask(service, "all_gather", place, *calls)
    assert (found.latency_us < 1.5 * _wire_us("all_gather", place, *calls)).all()
    at_home = _ask(service, "all_gather", broken, (2**32, 2, 2))
    assert at_home.latency_us[0] > 15 * _wire_us("all_gather", broken, (2**32, 2, 2))[0]


@given(
    name=st.sampled_from(sorted(all_topologies())),
    operator=st.sampled_from(["all_reduce", "all_gather", "all_to_all", "send_recv"]),
    message_bytes=st.integers(1, 2**36),
    nodes=st.integers(1, 512),
    told_us=st.floats(1e-6, 1e12),
)
def test_an_answer_that_is_not_interpolated_lies_within_the_band(
    name: str, operator: str, message_bytes: int, nodes: int, told_us: float
) -> None:
    topology, spec = find_topology(name), find_operator(operator)
    columns = _columns([(message_bytes, 1 if nodes > 1 else 2, nodes)])
    target = Target(device=find_device(topology.device), dtype=DType.BF16, topology=topology)
    one = np.array([told_us])
    found = LatencyColumns(
        latency_us=one,
        low_us=one / 2,
        high_us=one * 2,
        provenance=np.array([Provenance.TRANSFERRED.value]),
        nearest_us=np.zeros(1),
        nearest_octaves=np.array([np.inf]),
    )
    design = build_design(spec, columns, target)
    band = link_band(spec, columns, topology, design)
    held = hold_to_links(spec, columns, target, found)
    assert band.low_us[0] <= held.low_us[0] <= held.latency_us[0] <= held.high_us[0]
    assert held.high_us[0] <= band.high_us[0]
    assert band.high_us[0] >= design.roofline_us[0]
    if operator != "all_reduce":
        assert band.low_us[0] >= design.roofline_us[0]
