"""What padding adds to experts: two products of it, where an engine computes blocks of rows."""

import numpy as np
import pytest

from foretoken.domain.frameworks.engine import EngineSpec
from foretoken.domain.measurements.estimate import (
    DType,
    LatencyColumns,
    OperatorTable,
    Provenance,
)
from foretoken.domain.models.architecture import find_model
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.cost.expert_padding import add_padding, padding_tables
from foretoken.simulator.cost.latency_surfaces import surface_spec

_COLUMNS = {
    "num_tokens": np.array([1, 64]),
    "top_k": np.array([8, 8]),
    "num_experts": np.array([128, 128]),
    "num_active_experts": np.array([8, 126]),
    "hidden": np.array([4096, 4096]),
    "intermediate": np.array([768, 768]),
}


def _table(variant: str = "quant=fp8_block;routing=balanced") -> OperatorTable:
    return OperatorTable(operator="moe_experts", dtype=DType.FP8, columns=_COLUMNS, variant=variant)


def _tables(
    table: OperatorTable,
    device: str = "h200_sxm",
    profile: str = "vllm-0.12",
    tp: int = 2,
    ep: int = 1,
) -> list[OperatorTable]:
    scenario = ServingScenario(
        model=find_model("qwen3-235b-a22b-fp8"),
        device=device,
        layout=ParallelLayout(tp=tp, ep=ep),
        engine=EngineSpec(profile=profile),
    )
    return list(padding_tables(table, surface_spec(scenario, 4096)))


def test_a_block_less_a_row_for_each_expert_is_computed_whatever_the_batch() -> None:
    up, down, activation, conversion = _tables(_table())
    for table, (n, k) in ((up, (1536, 4096)), (down, (4096, 768))):
        assert ("gemm", DType.FP8, "quant=fp8_block") == (
            table.operator,
            table.dtype,
            table.variant,
        )
        assert set(find_operator("gemm").dim_names) == set(table.columns)
        assert [(128 * 127, n, k)] * 2 == list(zip(*(table.columns[d] for d in "mnk"), strict=True))
    for table, width in ((activation, "intermediate"), (conversion, "hidden")):
        assert (DType.BF16, "") == (table.dtype, table.variant)
        assert {"num_tokens": 128 * 127, width: 768} == {
            name: column[0] for name, column in table.columns.items()
        }


@pytest.mark.parametrize("experts_us", [200.0, 1200.0])
def test_padded_products_are_between_the_longer_of_reading_and_computing_and_both(
    experts_us: float,
) -> None:
    """Next to 200 and 100 us of products 50 and 50 of what else the padding takes."""

    def answer(latency_us: float) -> LatencyColumns:
        column = np.full(1, latency_us)
        provenance = np.full(1, Provenance.MEASURED.value)
        return LatencyColumns(
            latency_us=column, low_us=column / 2, high_us=column * 2, provenance=provenance
        )

    padded = add_padding(answer(experts_us), [answer(each) for each in (200.0, 100.0, 50.0, 50.0)])
    least, most = max(experts_us, 300.0) + 100.0, experts_us + 400.0
    assert least < padded.latency_us[0] < most
    assert pytest.approx(least * most) == padded.latency_us[0] ** 2
    assert padded.low_us[0] <= least <= most <= padded.high_us[0]


def test_0_14_pads_as_the_releases_before_it() -> None:
    assert 4 == len(_tables(_table(), profile="vllm-0.14"))


def test_a_rank_pads_the_experts_that_it_holds() -> None:
    columns = {**_COLUMNS, "num_local_experts": np.array([16, 16])}
    local = OperatorTable(
        operator="moe_local_experts", dtype=DType.FP8, columns=columns, variant="quant=fp8_block"
    )
    assert [16 * 127] * 2 == _tables(local, tp=8, ep=8)[0].columns["m"].tolist()


@pytest.mark.parametrize(
    ("variant", "device", "profile", "tp"),
    [
        ("routing=balanced", "h200_sxm", "vllm-0.12", 2),
        ("quant=fp8_block", "b200", "vllm-0.12", 2),
        ("quant=fp8_block", "h200_sxm", "vllm-0.16", 2),
        ("quant=fp8_block", "h200_sxm", "vllm-0.14", 8),
        ("quant=fp8_block", "h200_sxm", "vllm-0.12", 8),
    ],
)
def test_other_formats_devices_releases_and_eight_ranks_pad_nothing(
    variant: str, device: str, profile: str, tp: int
) -> None:
    assert not _tables(_table(variant), device, profile, tp=tp)
