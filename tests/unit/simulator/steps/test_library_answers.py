"""What a trainer's libraries take where servers' kernels were measured."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from foretoken.domain.frameworks.trainer import TrainerProfile
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    LatencyQuery,
    LatencyReply,
    OperatorTable,
    Phase,
    Provenance,
)
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.simulator.steps.library_answers import answer_by_libraries

# Microseconds by operator and part.
_TIMES_US: Mapping[tuple[str, str], float] = {
    ("gemm", ""): 900.0,
    ("quantize", "part=scale"): 110.0,
    ("quantize", "part=convert"): 70.0,
    ("attention_prefill", ""): 500.0,
    ("grouped_gemm", ""): 800.0,
}
_GEMM = {"m": 8192, "n": 8192, "k": 8192}
_LENGTH = 8192
_ATTENTION = {
    "num_seqs": 1,
    "q_tokens": _LENGTH,
    "kv_tokens": _LENGTH,
    "score_pairs": _LENGTH * (_LENGTH + 1) // 2,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
}
# Two products of a value for each pair of a query and a key, in operations.
_ATTENTION_FLOPS = 4 * _ATTENTION["score_pairs"] * 32 * 128


class _Servers:
    """Measured servers' kernels, of which a scenario names `named`; `own` is the trainer's.

    Those of work that lasts are asked for with `lasts`.
    """

    def __init__(
        self,
        own: str = "",
        named: str = "",
        provenance: Provenance = Provenance.MEASURED,
        *,
        lasts: bool = False,
    ) -> None:
        self.own, self.named, self.provenance, self.lasts = own, named, provenance, lasts
        self.queries: list[LatencyQuery] = []

    def predict(self, query: LatencyQuery) -> LatencyReply:
        self.queries.append(query)
        tables = tuple(self._answer(query, table) for table in query.tables)
        return LatencyReply(model_version="fake", tables=tables)

    def list_models(self) -> Sequence[ModelVersion]:
        return ()

    def _answer(self, query: LatencyQuery, table: OperatorTable) -> LatencyColumns:
        time_us = np.full(table.num_rows, _TIMES_US[table.operator, table.variant])
        is_asked = query.preferred_framework in ("trtllm", self.own)
        return LatencyColumns(
            latency_us=time_us,
            low_us=0.9 * time_us,
            high_us=1.1 * time_us,
            provenance=np.full(table.num_rows, self.provenance.value),
            other_framework="" if is_asked else "vllm 0.24",
        )


def _answer(
    servers: _Servers,
    operator: str,
    dims: Mapping[str, int],
    *,
    dtype: DType = DType.FP8,
    phase: Phase = Phase.FORWARD,
    device: str = "h100_sxm",
) -> LatencyColumns:
    columns = {name: np.array([value]) for name, value in dims.items()}
    query = LatencyQuery(
        device=device,
        framework=servers.named,
        preferred_framework="pytorch",
        sustained=servers.lasts,
        tables=(OperatorTable(operator=operator, dtype=dtype, phase=phase, columns=columns),),
    )
    trainer = TrainerProfile(
        name="own", software="pytorch", attention_library="cudnn", fp8_software="trtllm"
    )
    (found,) = answer_by_libraries(query, servers.predict(query).tables, trainer, servers)
    return found


def test_the_conversion_of_the_input_is_taken_off_a_product_in_8_bit() -> None:
    found = _answer(_Servers(), "gemm", _GEMM)
    assert [900.0 - 110.0 - 70.0] == pytest.approx(found.latency_us)
    assert found.low_us[0] <= found.latency_us[0] <= found.high_us[0]


def test_both_gradients_are_products_of_converted_inputs() -> None:
    found = _answer(_Servers(), "gemm", _GEMM, phase=Phase.BACKWARD)
    assert [2 * 720.0] == pytest.approx(found.latency_us)


def test_a_product_takes_as_long_as_the_peak_at_least() -> None:
    # So many operations at the peak take longer than what is left.
    sides = dict.fromkeys("mnk", 16384)
    least_us = 2 * 16384**3 / find_device("h100_sxm").peak_flops(DType.FP8) * 1e6
    assert [least_us] == pytest.approx(list(_answer(_Servers(), "gemm", sides).latency_us))


def test_products_of_groups_are_those_of_all_rows() -> None:
    dims = {"num_groups": 8, **_GEMM}
    servers = _Servers(provenance=Provenance.TRANSFERRED)
    assert [720.0] == pytest.approx(_answer(servers, "grouped_gemm", dims).latency_us)


def test_measured_products_of_groups_stay() -> None:
    dims = {"num_groups": 8, **_GEMM}
    assert [800.0] == list(_answer(_Servers(), "grouped_gemm", dims).latency_us)


@pytest.mark.parametrize(
    "servers",
    [
        _Servers(own="pytorch"),
        _Servers(named="vllm 0.24"),
        _Servers(provenance=Provenance.ANALYTICAL),
    ],
    ids=["the trainer's own were measured", "a software was named", "nothing was measured"],
)
def test_other_answers_stay(servers: _Servers) -> None:
    assert [900.0] == list(_answer(servers, "gemm", _GEMM).latency_us)


def test_products_in_16_bit_stay() -> None:
    servers = _Servers()
    assert [900.0] == list(_answer(servers, "gemm", _GEMM, dtype=DType.BF16).latency_us)
    assert len(servers.queries) == 1


@pytest.mark.parametrize(
    ("device", "phase", "work", "tflops"),
    [
        ("h100_sxm", Phase.FORWARD, 1.0, 529),
        ("h100_sxm", Phase.BACKWARD, 2.5, 518 * 529 / 600),
        ("gb200", Phase.FORWARD, 1.0, 1598),
        ("b200", Phase.FORWARD, 1.0, 1598 * 2250 / 2500),
        # Measured behind a mask: 1,311.
        ("gb200", Phase.BACKWARD, 2.5, 1311),
    ],
)
def test_attention_is_as_fast_as_its_library_was_published(
    device: str, phase: Phase, work: float, tflops: float
) -> None:
    found = _answer(
        _Servers(), "attention_prefill", _ATTENTION, dtype=DType.BF16, phase=phase, device=device
    )
    assert [work * _ATTENTION_FLOPS / tflops / 1e6] == pytest.approx(found.latency_us, rel=0.02)


def test_power_slows_published_attention_of_steps_where_it_limits_a_device() -> None:
    burst, lasting = (
        _answer(
            _Servers(lasts=lasts),
            "attention_prefill",
            _ATTENTION,
            dtype=DType.BF16,
            device="gb200",
        )
        for lasts in (False, True)
    )
    limited = find_device("gb200").throttled_from_ratio[DType.BF16]
    # Products alone, without the power of what they read.
    slowed = (1598 / 2500 / limited) ** (1 / 3)
    assert slowed == pytest.approx(lasting.latency_us[0] / burst.latency_us[0], rel=0.03)
    assert lasting.high_us[0] / lasting.latency_us[0] > burst.high_us[0] / burst.latency_us[0]


@pytest.mark.parametrize(
    ("device", "own"),
    [("h100_sxm", "pytorch"), ("a100_sxm_80", ""), ("rtx_5090", "")],
    ids=["the trainer's own was measured", "on Ampere", "on a Blackwell for desks"],
)
def test_measured_attention_stays_where_nothing_was_published(device: str, own: str) -> None:
    found = _answer(
        _Servers(own=own), "attention_prefill", _ATTENTION, dtype=DType.BF16, device=device
    )
    assert [500.0] == list(found.latency_us)


def test_heads_of_64_are_slower_and_other_products_of_a_chip_as_its_peak() -> None:
    wide = _answer(_Servers(), "attention_prefill", _ATTENTION, dtype=DType.BF16).latency_us[0]
    halves = {**_ATTENTION, "head_dim": 64, "num_heads": 64}
    narrow = _answer(_Servers(), "attention_prefill", halves, dtype=DType.BF16).latency_us[0]
    card = _answer(
        _Servers(), "attention_prefill", _ATTENTION, dtype=DType.BF16, device="h100_pcie"
    ).latency_us[0]
    assert wide * 600 / 412 == pytest.approx(narrow, rel=0.01)
    assert wide * 989.4 / 756 == pytest.approx(card, rel=0.02)
