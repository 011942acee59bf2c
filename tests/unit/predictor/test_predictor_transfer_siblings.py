"""What devices of the same chip, and documents, say where nothing was measured."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Phase,
    Provenance,
)
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.estimator import Estimator
from foretoken.predictor.features import build_design
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.roofline import Columns, Target
from foretoken.predictor.transfer.links import (
    choose_rows,
    estimate_from_links,
    has_document,
)
from foretoken.predictor.transfer.siblings import find_siblings, move_to_sibling


def _estimates(*latency_us: float) -> LatencyColumns:
    times = np.array(latency_us)
    return LatencyColumns(
        latency_us=times,
        low_us=0.9 * times,
        high_us=1.1 * times,
        provenance=np.full(len(times), Provenance.MEASURED.value),
        nearest_us=times,
        nearest_octaves=np.zeros(len(times)),
    )


@pytest.mark.parametrize(
    ("device", "dtype", "siblings"),
    [
        ("a100_sxm_40", DType.BF16, ("a100_sxm_80",)),
        ("h100_sxm", DType.BF16, ("h800_sxm", "gh200", "h100_nvl", "h200_sxm")),
        ("b200", DType.FP8, ("b300", "gb200", "gb300")),
        # Blackwell Ultra has half as much FP4 again.
        ("b200", DType.FP4, ("gb200",)),
        ("mi325x", DType.BF16, ("mi300x",)),
        ("a30", DType.BF16, ()),
    ],
)
def test_siblings_are_products_of_the_same_chip(
    device: str, dtype: DType, siblings: tuple[str, ...]
) -> None:
    found = find_siblings(find_device(device), dtype)
    assert siblings == tuple(other.name for other in found)


def test_a_kernel_bound_by_memory_waits_for_the_slower_memory() -> None:
    moved = move_to_sibling(_estimates(178.0), np.array([148.0]), np.array([194.0]))
    assert moved.latency_us == pytest.approx([224.0])
    assert moved.provenance.tolist() == [Provenance.TRANSFERRED.value]


@given(
    st.floats(0.1, 1e6), st.floats(0.1, 1e6), st.floats(0.1, 1e6), st.sampled_from((0.2, 1.0, 5.0))
)
def test_moved_times_stay_positive_and_ordered(
    latency_us: float, measured_us: float, asked_us: float, ratio: float
) -> None:
    moved = move_to_sibling(
        _estimates(latency_us), np.array([measured_us]), np.array([asked_us * ratio])
    )
    assert 0 < moved.low_us[0] <= moved.latency_us[0] * (1 + 1e-9)
    assert moved.latency_us[0] <= moved.high_us[0] * (1 + 1e-9)


def _groups(message_bytes: int, *groups: tuple[int, int]) -> Columns:
    return {
        "message_bytes": np.full(len(groups), message_bytes),
        "devices_per_node": np.array([devices for devices, _ in groups]),
        "num_nodes": np.array([nodes for _, nodes in groups]),
    }


def _from_links(operator: str, columns: Columns, topology: str) -> LatencyColumns:
    spec, links = find_operator(operator), find_topology(topology)
    target = Target(
        device=find_device(links.device), dtype=DType.BF16, phase=Phase.FORWARD, topology=links
    )
    return estimate_from_links(spec, columns, links, build_design(spec, columns, target))


def test_large_messages_take_the_documented_share_of_their_links() -> None:
    columns = _groups(8 * 10**9, (8, 2))
    found = _from_links("all_reduce", columns, "a100_selene")
    bus_bytes_per_s = 2 * 15 / 16 * 8e9 / (float(found.latency_us[0]) * 1e-6)
    assert bus_bytes_per_s == pytest.approx(192e9, rel=0.01)


@pytest.mark.parametrize("operator", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_more_nodes_never_take_less_time(operator: str) -> None:
    groups = [(8, 2**power) for power in range(1, 9)]
    times = _from_links(operator, _groups(2**24, *groups), "a100_selene").latency_us
    assert (np.diff(times) >= 0).all()


def test_only_links_with_a_document_are_told_from_it() -> None:
    inside, between = _groups(2**20, (8, 1)), _groups(2**20, (8, 2))
    selene, b200 = find_topology("a100_selene"), find_topology("b200_hgx")
    gather = find_operator("all_gather")
    assert [False] == has_document(gather, inside, selene).tolist()
    assert [True] == has_document(gather, between, selene).tolist()
    assert [True] == has_document(gather, inside, b200).tolist()
    assert [False] == has_document(gather, between, b200).tolist()


def test_rows_are_chosen_one_by_one() -> None:
    first, second = _estimates(1.0, 2.0), _estimates(3.0, 4.0)
    names = ("near", "far")
    chosen = choose_rows(np.array([True, False]), first, second, names)
    assert chosen.latency_us.tolist() == [1.0, 4.0]
    assert "near: ; far: " == chosen.basis
    assert first is choose_rows(np.array([True, True]), first, second, names)
    assert second is choose_rows(np.array([False, False]), first, second, names)


def test_inside_a_node_a_topology_answers_as_that_of_the_same_nodes() -> None:
    estimator = Estimator(ModelSet())
    columns = _groups(2**24, (8, 1), (8, 2))
    table = OperatorTable(operator="all_reduce", dtype=DType.BF16, columns=columns)

    def ask(topology: str) -> LatencyColumns:
        query = LatencyQuery(device="a100_sxm_80", topology=topology, tables=(table,))
        return estimator.predict(query).tables[0]

    selene, same_nodes = ask("a100_selene"), ask("a100_dgx")
    between = _from_links("all_reduce", _groups(2**24, (8, 2)), "a100_selene")
    assert same_nodes.latency_us[0] == selene.latency_us[0]
    assert between.latency_us[0] == selene.latency_us[1]


def test_documents_answer_row_by_row() -> None:
    """On links of which documents tell inside a node alone."""
    estimator = Estimator(ModelSet())

    def ask(*groups: tuple[int, int]) -> LatencyColumns:
        columns = _groups(2**24, *groups)
        table = OperatorTable(operator="all_reduce", dtype=DType.BF16, columns=columns)
        query = LatencyQuery(device="b200", topology="b200_hgx", tables=(table,))
        return estimator.predict(query).tables[0]

    together, inside, between = ask((8, 1), (8, 2)), ask((8, 1)), ask((8, 2))
    assert [inside.latency_us[0], between.latency_us[0]] == together.latency_us.tolist()
    assert "no measurement; the links of b200_hgx and what documents say they reach" == inside.basis
    assert "the roofline alone" in between.basis
