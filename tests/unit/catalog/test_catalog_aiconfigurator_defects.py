"""What cannot be used of AIConfigurator's tables is named or noted, never half read."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from aiconfigurator_tables import (
    ATTENTION,
    GEMM,
    MLA_MODULE,
    MOE,
    NCCL,
    plan_rows,
    read_plan,
    write_table,
)
from pyarrow import parquet

from foretoken.catalog.importing import RAW_TABLE
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import InvalidRequestError

_TEXTS = ("framework", "version", "device", "op_name", "kernel_source")


@pytest.mark.parametrize(
    ("table", "row", "message"),
    [
        ("gemm_perf", {**GEMM, "latency": -0.5}, "the latency is negative"),
        ("gemm_perf", {**GEMM, "m": "many"}, "m: 'many' is not a number"),
        ("gemm_perf", {**GEMM, "m": 0.5}, r"m: 0\.5 is not a whole number"),
        ("gemm_perf", {**GEMM, "m": None}, "m: nan is not a whole number"),
        ("gemm_perf", {**GEMM, "m": 0}, "gemm: m is below 1"),
        ("gemm_perf", {**GEMM, "latency": "fast"}, "latency: 'fast' is not a number"),
        ("moe_perf", {**MOE, "moe_ep_size": 3}, "128 experts on 3 ranks"),
        ("moe_perf", {**MOE, "moe_tp_size": 5}, "moe_tp_size does not divide inter_size"),
        ("moe_perf", {**MOE, "topk": 256}, "topk is 256 of 128 experts"),
        ("nccl_perf", {**NCCL, "num_gpus": 17}, "num_gpus do not fill their nodes evenly"),
    ],
)
def test_an_impossible_row_is_left_out(
    tmp_path: Path, table: str, row: Mapping[str, Any], message: str
) -> None:
    """With the reason; other tables go in."""
    write_table(tmp_path / f"{table}.parquet", row)
    assert _left_out(tmp_path, rf"{table}\.parquet: 1 rows are not read: .*{message}")


def test_the_other_rows_of_a_table_go_in(tmp_path: Path) -> None:
    write_table(tmp_path / "gemm_perf.parquet", {**GEMM, "m": 0}, GEMM, {**GEMM, "latency": -1.0})
    plan = read_plan(tmp_path)
    assert [2] == [row["source_row"] for row in plan_rows(plan)]
    assert (3, 2) == (plan.num_rows, plan.remarks.num_passed)
    assert [
        "gemm_perf.parquet: 1 rows are not read: gemm: m is below 1",
        "gemm_perf.parquet: 1 rows are not read: the latency is negative",
    ] == sorted(plan.notes)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    row = {name: value for name, value in GEMM.items() if name != "k"}
    write_table(tmp_path / "gemm_perf.parquet", row)
    assert _left_out(tmp_path, r".*gemm_perf\.parquet: missing columns k")


@pytest.mark.parametrize("num_bytes", [0, 4, 100])
def test_a_file_cut_short_is_named(tmp_path: Path, num_bytes: int) -> None:
    path = write_table(tmp_path / "gemm_perf.parquet", GEMM)
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert _left_out(tmp_path, r"gemm_perf\.parquet: not read: .*: not a Parquet file")


@pytest.mark.parametrize("latency", [math.nan, None, math.inf])
def test_a_row_without_time_is_a_failed_row(tmp_path: Path, latency: float | None) -> None:
    write_table(tmp_path / "gemm_perf.parquet", GEMM, {**GEMM, "latency": latency})
    expected = [("ok", 500.0, None), ("failed", None, "the source has no time for this row")]
    assert expected == [
        (row["status"], row["latency_us_median"], row["status_reason"])
        for row in plan_rows(read_plan(tmp_path))
    ]


def test_an_unknown_device_says_how_to_add_it(tmp_path: Path) -> None:
    write_table(tmp_path / "gemm_perf.parquet", {**GEMM, "device": "NVIDIA H2000"})
    assert _left_out(tmp_path, "gemm_perf.*: 1 rows .*NVIDIA H2000.*add a file for it")


@pytest.mark.parametrize(
    ("table", "row", "note"),
    [
        ("gemm_perf", {**GEMM, "gemm_dtype": "awq"}, "gemm_dtype 'awq' is unknown here"),
        ("moe_perf", {**MOE, "distribution": "eplb"}, "distribution 'eplb' is unknown here"),
        ("moe_perf", {**MOE, "moe_dtype": "w1a1"}, "moe_dtype 'w1a1' is unknown here"),
        (
            "moe_perf",
            {**MOE, "moe_dtype": "int4_wo", "kernel_source": "vllm_marlin_int4_moe"},
            "kernel 'vllm_marlin_int4_moe' is not the one it names",
        ),
        (
            "moe_perf",
            {**MOE, "moe_dtype": "nvfp4", "kernel_source": "vllm_flashinfer_trtllm_moe_fp4"},
            "kernel 'vllm_flashinfer_trtllm_moe_fp4' was timed without the tuning",
        ),
        (
            "moe_perf",
            {**MOE, "moe_dtype": "fp8_block", "kernel_source": "vllm_fused_moe"}
            | {"device": "NVIDIA B200"},
            "kernel 'vllm_fused_moe' is not what vLLM multiplies blocks of FP8 with",
        ),
        (
            "moe_perf",
            {**MOE, "moe_dtype": "fp8_block", "kernel_source": "vllm_fused_moe"}
            | {"device": "NVIDIA H200", "moe_ep_size": 2},
            "kernel 'vllm_fused_moe' is not what vLLM multiplies blocks of FP8 with",
        ),
        (
            "gemm_perf",
            {**GEMM, "gemm_dtype": "nvfp4", "framework": "TRTLLM"},
            "products in NVFP4 were timed without the tuning that TensorRT-LLM serves with",
        ),
        ("nccl_perf", {**NCCL, "op_name": "gather"}, "gather in 'half' is unknown here"),
        (
            "context_attention_perf",
            {**ATTENTION, "beam_width": 4},
            "beam_width 4: beams share their context, no operator has that",
        ),
        ("context_attention_perf", {**ATTENTION, "attn_dtype": "fp6"}, "attention in 'fp6'"),
        (
            "context_attention_perf",
            {**ATTENTION, "window_size": 4, "step": 8},
            "a window over cached tokens",
        ),
        ("mla_context_module_perf", {**MLA_MODULE, "model": "a/b"}, "a/b"),
        ("mla_context_module_perf", {**MLA_MODULE, "model": "llama-3-8b"}, "no latent attention"),
    ],
)
def test_rows_of_unknown_kinds_are_noted(
    tmp_path: Path, table: str, row: Mapping[str, Any], note: str
) -> None:
    """Rows next to them are read."""
    write_table(tmp_path / f"{table}.parquet", row)
    assert _left_out(tmp_path, rf"{table}\.parquet: 1 rows are not read: .*{re.escape(note)}")


def test_tables_without_an_operator_are_kept_as_they_are(
    tmp_path: Path, catalog: CatalogService
) -> None:
    """Any number of times the same."""
    write_table(tmp_path / "gemm_perf.parquet", GEMM)
    path = write_table(tmp_path / "h100_sxm/moe/vllm/0.24.0/moe_a2a_perf.parquet", GEMM)
    for _ in range(2):
        plan = read_plan(tmp_path)
        assert 1 == len(plan_rows(plan))
        for table in plan.raw_tables:
            table.store(catalog)
    place = "h100_sxm/moe/vllm/0.24.0/moe_a2a_perf.parquet"
    reason = "moe_a2a_perf: no operator here is what it measured, kept as it is"
    assert (f"{place}: {reason}",) == plan.notes
    (kept,) = catalog.list_artifacts(RAW_TABLE)
    assert path.read_bytes() == b"".join(catalog.read_artifact(RAW_TABLE, kept.name))
    assert {
        "tool": "aiconfigurator",
        "table": "moe_a2a_perf",
        "device": "h100_sxm",
        "framework": "vllm",
        "framework_version": "0.24.0",
        "source_file": place,
        "num_rows": 1,
    } == json.loads(kept.metadata_json)


def test_a_folder_with_nothing_to_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "SHARED_LAYER_REUSE.txt").write_text("0.24.0\n")
    with pytest.raises(InvalidRequestError, match="no rows of their own"):
        read_plan(tmp_path)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    """A table or a folder elsewhere is not read by way of a link."""
    outside = write_table(tmp_path / "outside" / "gemm_perf.parquet", GEMM)
    for target in (outside, outside.parent):
        root = tmp_path / f"inside_{target.name}"
        root.mkdir()
        (root / "gemm_perf.parquet").symlink_to(target)
        with pytest.raises(InvalidRequestError, match="leads out of"):
            read_plan(root)


def test_a_link_inside_the_folder_gives_no_rows_twice(tmp_path: Path) -> None:
    path = write_table(tmp_path / "0.24.0" / "gemm_perf.parquet", GEMM)
    (tmp_path / "0.25.0").symlink_to(path.parent)
    (tmp_path / "gemm_perf.parquet").symlink_to(path)
    plan = read_plan(tmp_path)
    assert 1 == len(plan_rows(plan))
    assert ("0.25.0 and 1 more: a link, read where it leads",) == plan.notes


def test_a_table_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    """By its footer, before it is unpacked."""
    path = write_table(tmp_path / "gemm_perf.parquet", *[GEMM] * 10_000)
    options = {"max_bytes": str(path.stat().st_size + 10_000)}
    assert _left_out(tmp_path, ".*one import may read", options=options)


@pytest.mark.parametrize("has_dictionary", [True, False])
@pytest.mark.parametrize("column", [*_TEXTS, "gemm_dtype", "of_no_use"])
def test_texts_that_are_not_utf8_are_named(
    tmp_path: Path, column: str, has_dictionary: bool
) -> None:
    """Parquet says that they are text and checks nothing."""
    path = write_table(tmp_path / "gemm_perf.parquet", {**GEMM, "of_no_use": "x"})
    table = parquet.read_table(path)
    spoilt = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())
    table = table.set_column(table.schema.get_field_index(column), column, spoilt)
    parquet.write_table(table, path, use_dictionary=has_dictionary)
    assert _left_out(tmp_path, f".*column '{column}' cannot be read: .*UTF8")


def _left_out(root: Path, pattern: str, **changes: Any) -> list[str]:
    """Return the groups, or all, of the one note that fits; a table next to it is read."""
    write_table(root / "rest" / "nccl_perf.parquet", NCCL)
    plan = read_plan(root, **changes)
    assert {"all_gather"} == {row["operator"] for row in plan_rows(plan)}
    (found,) = (match for note in plan.notes if (match := re.match(pattern, note)))
    return list(found.groups() or [found[0]])
