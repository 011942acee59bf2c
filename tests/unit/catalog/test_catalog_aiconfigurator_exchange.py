"""DeepEP's exchanges of tokens as AIConfigurator's tables hold them."""

from pathlib import Path

import pytest
from aiconfigurator_tables import plan_rows, read_plan, write_table

# 1024 tokens to 8 experts each: 117,440,512 bytes come back in 480 us.
_WIDE = {
    "op_name": "ll",
    "node_num": 1,
    "hidden_size": 7168,
    "num_token": 1024,
    "num_topk": 8,
    "num_experts": 256,
    "dispatch_avg_t_us": 211.0,
    "dispatch_bandwidth_gbps": 287.6,
    "combine_avg_t_us": 480.0,
    "combine_bandwidth_gbps": 117_440_512 / 480 / 1e3,
}
_TABLE = "wideep_deepep_ll_perf.parquet"


def test_a_row_is_an_exchange_each_way(tmp_path: Path) -> None:
    """To experts in FP8 with 56 scales a token, back in 16 bit; the times are in us."""
    rows = plan_rows(read_plan(write_table(tmp_path / _TABLE, _WIDE)))
    group = {"devices_per_node": 8, "num_nodes": 1}
    expected = [
        (
            "exchange=deepep_low_latency;part=dispatch",
            {"message_bytes": 8192 * (7168 + 4 * 56), **group},
            211.0,
        ),
        (
            "exchange=deepep_low_latency;part=combine",
            {"message_bytes": 8192 * 7168 * 2, **group},
            480.0,
        ),
    ]
    assert expected == [(row["variant"], row["dims"], row["latency_us_median"]) for row in rows]
    assert {("all_to_all", "bf16", "h200_hgx")} == {
        (row["operator"], row["dtype"], row["topology"]) for row in rows
    }


def test_pairs_that_were_not_sent_do_not_count(tmp_path: Path) -> None:
    """Of sixteen pairs the test that timed two tokens left out eight, on eight nodes."""
    row = {
        **_WIDE,
        "node_num": 8,
        "num_token": 2,
        "combine_avg_t_us": 30.0,
        "combine_bandwidth_gbps": 3.82,
    }
    out, back = plan_rows(read_plan(write_table(tmp_path / _TABLE, row)))
    assert (8 * 7392, 8 * 14336, 8) == (
        out["dims"]["message_bytes"],
        back["dims"]["message_bytes"],
        out["dims"]["num_nodes"],
    )


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"op_name": "normal"}, "'normal' of DeepEP's low-latency kernels is unknown here"),
        ({"num_experts": 16}, "of fewer than 128 experts few multiprocessors send"),
        ({"device": "NVIDIA GB200"}, "how many devices of gb200_nvl72 exchange tokens is not said"),
    ],
)
def test_exchanges_of_another_kind_are_noted(
    tmp_path: Path, said: dict[str, object], reason: str
) -> None:
    """The row next to it is read both ways."""
    plan = read_plan(write_table(tmp_path / _TABLE, {**_WIDE, **said}, _WIDE))
    assert [2, 2] == [row["source_row"] for row in plan_rows(plan)]
    assert (f"{_TABLE}: 2 rows are not read: {reason}",) == plan.notes
