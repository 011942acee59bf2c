"""What an estimate rests on where nothing like it was measured on the device asked about."""

import numpy as np
import pytest
from predictor_fakes import MakePredictor, Rows, Train, base_us, gemm_rows, row_of

from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    OperatorTable,
    Provenance,
)
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.predictor.service import PredictorService
from foretoken.predictor.transfer.efficiency_prior import default_transfer, transfer_names
from foretoken.predictor.transfer.support import Support

_MOE = Support(
    operators=("moe_experts",),
    devices=("a100_sxm_80", "h200_sxm"),
    architectures=("ampere", "hopper"),
)


@pytest.mark.parametrize(
    ("operator", "device", "expected"),
    [
        ("gemm", "h100_sxm", "gemm on 2 other GPUs"),
        ("gemm", "l40s", "gemm on 3 other GPUs"),
        ("rms_norm", "h100_sxm", "other operators of 2 other GPUs"),
    ],
)
def test_says_whose_measurements_speak(operator: str, device: str, expected: str) -> None:
    devices = tuple(name for name in ("a30", "a100_sxm_80", "h100_sxm") if name != device)
    support = Support(operators=("gemm",), devices=devices, architectures=("ampere", "hopper"))
    assert expected == support.describe(find_operator(operator), find_device(device))


def test_another_number_format_of_the_device_is_said_beside_the_other_devices() -> None:
    support = Support(operators=("gemm",), devices=("a30", "h100_sxm"), architectures=("ampere",))
    assert "gemm on 1 other GPU and this device in another number format, pass or topology" == (
        support.describe(find_operator("gemm"), find_device("a30"))
    )


def test_nothing_measured_is_the_roofline_alone() -> None:
    assert "the roofline alone" == Support().describe(find_operator("gemm"), find_device("a30"))


@pytest.mark.parametrize(
    ("operator", "device", "can_tell"),
    [
        ("moe_experts", "h100_sxm", True),
        ("moe_experts", "gb200", False),
        ("moe_local_experts", "h100_sxm", False),
        ("all_reduce", "h100_sxm", False),
        ("gemm", "gb200", True),
    ],
)
def test_moe_and_collectives_need_a_measurement_on_their_architecture(
    operator: str, device: str, can_tell: bool
) -> None:
    spec, where = find_operator(operator), find_device(device)
    assert can_tell == _MOE.can_tell(spec, where)
    says_so = "cannot be estimated without a measurement" in _MOE.describe(spec, where)
    assert can_tell is not says_so


def test_a_collective_on_an_unseen_architecture_is_in_more_doubt(
    make_predictor: MakePredictor, train: Train
) -> None:
    """Two devices of one architecture agree, which tells nothing of the next."""
    service = make_predictor(
        [*_all_reduces("a100_sxm_80", "a100_dgx"), *_all_reduces("a40", "a40_pcie")]
    )
    train(service)
    near, far = _ask(service, "a30"), _ask(service, "h100_sxm")
    assert [Provenance.TRANSFERRED.value] * 2 == [*near.provenance, *far.provenance]
    assert "all_reduce on 2 other GPUs" == near.basis
    assert "(hopper) cannot be estimated without a measurement" in far.basis
    assert near.high_us[0] / near.low_us[0] < 2.0
    # As unsure as without any measurement, as far as its links leave room for that.
    doubt_log = default_transfer().high_log - default_transfer().low_log
    assert 3.0 < far.high_us[0] / far.low_us[0] <= np.exp(doubt_log)


@pytest.mark.parametrize("operator", ["kv_swap", "host_step", "launch_gap"])
def test_what_the_devices_memory_does_not_bound_tells_no_other_operator(operator: str) -> None:
    names = transfer_names(find_operator(operator), find_device("a30"), "direction=h2d")
    assert (f"{operator} (direction=h2d) on any gpu", f"{operator} on any gpu") == names


def test_times_from_a_warm_cache_tell_nothing_of_cold_calls_elsewhere(
    make_predictor: MakePredictor, train: Train
) -> None:
    cold = [*gemm_rows(device="a30"), *gemm_rows(device="a100_sxm_80")]
    warm = gemm_rows(lambda _: 0.6, device="a30", variant="cache=warm")
    columns = {"m": [64], "n": [4096], "k": [4096]}
    table = OperatorTable(operator="gemm", dtype=DType.FP16, columns=columns)
    query = LatencyQuery(device="h100_sxm", tables=(table,))
    answers = []
    for rows in (cold, [*cold, *warm]):
        service = make_predictor(rows)
        train(service)
        answers.append(service.predict(query).tables[0].latency_us.tolist())
    assert answers[0] == answers[1]


def _all_reduces(device: str, topology: str) -> Rows:
    rows = []
    for exponent in range(10, 29):
        dims = {"message_bytes": 2**exponent, "devices_per_node": 1, "num_nodes": 4}
        latency_us = base_us("all_reduce", dims, device, topology) / 0.8
        rows.append(row_of("all_reduce", dims, latency_us, device=device, topology=topology))
    return rows


def _ask(service: PredictorService, device: str) -> LatencyColumns:
    columns = {"message_bytes": [2**24], "devices_per_node": [1], "num_nodes": [4]}
    table = OperatorTable(operator="all_reduce", dtype=DType.FP16, columns=columns)
    return service.predict(LatencyQuery(device=device, tables=(table,))).tables[0]
