"""AIConfigurator's tables become canonical operators with everything that tells them apart."""

import hashlib
import os
import re
import shutil
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from aiconfigurator_tables import (
    ALL_REDUCE,
    ATTENTION,
    GEMM,
    MLA,
    MLA_MODULE,
    MOE,
    NCCL,
    plan_rows,
    read_plan,
    write_table,
)
from pyarrow import parquet

from foretoken.catalog.importers.aiconfigurator.formats import FAMILIES
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.wire.arrow import read_table

_HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
_PREFILL = {"num_seqs": 2, "q_tokens": 16, "kv_tokens": 16, "score_pairs": 72}
_DECODE = {"num_seqs": 2, "kv_tokens": 40, "kv_tokens_max": 20}
_LATENT = {
    "num_heads": 16,
    "hidden": 7168,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_EXPERTS = {"num_tokens": 64, "top_k": 8, "num_experts": 128, "hidden": 2048}
_LINKS = {"message_bytes": 512, "devices_per_node": 4, "num_nodes": 1}


def _row(root: Path, table: str, row: Mapping[str, Any]) -> dict[str, Any]:
    (found,) = plan_rows(read_plan(write_table(root / f"{table}.parquet", row)))
    return found


@pytest.mark.parametrize(
    ("table", "row", "operator", "dims"),
    [
        ("gemm_perf", GEMM, "gemm", {"m": 4, "n": 8, "k": 16}),
        ("context_attention_perf", ATTENTION, "attention_prefill", {**_PREFILL, **_HEADS}),
        (
            # Of eight tokens the first three see 1, 2 and 3 tokens, the others 3.
            "context_attention_perf",
            {**ATTENTION, "window_size": 3},
            "attention_prefill_window",
            {**_PREFILL, "score_pairs": 2 * 21, "window": 3, **_HEADS},
        ),
        (
            "generation_attention_perf",
            {**ATTENTION, "isl": 1, "step": 19},
            "attention_decode",
            {**_DECODE, **_HEADS},
        ),
        (
            "generation_attention_perf",
            {**ATTENTION, "isl": 1, "step": 19, "window_size": 3},
            "attention_decode_window",
            {**_DECODE, "visible_tokens": 6, "window": 3, **_HEADS},
        ),
        (
            "context_mla_perf",
            MLA,
            "mla_prefill",
            {
                **_PREFILL,
                "num_heads": 16,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            },
        ),
        (
            "generation_mla_perf",
            {**MLA, "isl": 1, "step": 19},
            "mla_decode",
            {**_DECODE, "num_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        ),
        ("mla_context_module_perf", MLA_MODULE, "mla_prefill_module", {**_PREFILL, **_LATENT}),
        (
            "mla_generation_module_perf",
            {**MLA_MODULE, "isl": 1, "step": 19},
            "mla_decode_module",
            {**_DECODE, **_LATENT},
        ),
        (
            # A rank of two has half of every expert.
            "moe_perf",
            {**MOE, "moe_tp_size": 2},
            "moe_experts",
            {**_EXPERTS, "num_active_experts": 128, "intermediate": 384},
        ),
        (
            "moe_perf",
            {**MOE, "moe_ep_size": 8},
            "moe_local_experts",
            {
                **_EXPERTS,
                "num_local_experts": 16,
                "num_local_pairs": 64,
                "num_active_experts": 16,
                "intermediate": 768,
            },
        ),
        ("nccl_perf", NCCL, "all_gather", _LINKS),
        ("nccl_perf", {**NCCL, "op_name": "alltoall"}, "all_to_all", _LINKS),
        (
            "nccl_perf",
            {**NCCL, "nccl_dtype": "int8"},
            "all_gather",
            {**_LINKS, "message_bytes": 256},
        ),
        ("custom_allreduce_perf", {**ALL_REDUCE, "op_name": "all_reduce"}, "all_reduce", _LINKS),
    ],
)
def test_a_row_is_the_operator_it_measured(
    tmp_path: Path, table: str, row: Mapping[str, Any], operator: str, dims: Mapping[str, int]
) -> None:
    """Every dimension is that of the rank timed; sizes are bytes, times µs."""
    found = _row(tmp_path, table, {**row, "latency": 0.25})
    assert (operator, dims, 250.0) == (found["operator"], found["dims"], found["latency_us_median"])


@pytest.mark.parametrize(
    ("table", "row", "dtype", "variant"),
    [
        ("gemm_perf", GEMM, "bf16", None),
        ("gemm_perf", {**GEMM, "gemm_dtype": "fp8"}, "fp8", None),
        ("gemm_perf", {**GEMM, "gemm_dtype": "fp8_block"}, "fp8", "quant=fp8_block"),
        ("gemm_perf", {**GEMM, "gemm_dtype": "int4_wo"}, "bf16", "quant=int4_wo"),
        ("gemm_perf", {**GEMM, "gemm_dtype": "sq"}, "int8", "quant=sq"),
        ("gemm_perf", {**GEMM, "gemm_dtype": "nvfp4"}, "fp4", "quant=nvfp4"),
        ("context_attention_perf", {**ATTENTION, "kv_cache_dtype": "fp8"}, "bf16", "kv=fp8"),
        (
            "context_attention_perf",
            {**ATTENTION, "attn_dtype": "fp8", "kv_cache_dtype": "fp8"},
            "fp8",
            None,
        ),
        # vLLM's layer has the weights around the latent space in it, TensorRT-LLM's has not.
        ("context_mla_perf", MLA, "bf16", "scope=unpacking"),
        ("context_mla_perf", {**MLA, "framework": "TRTLLM"}, "bf16", None),
        (
            "mla_context_module_perf",
            {**MLA_MODULE, "gemm_type": "fp8_block", "kv_cache_dtype": "fp8"},
            "fp8",
            "attn=bf16;kv=fp8;quant=fp8_block",
        ),
        ("moe_perf", {**MOE, "distribution": "power_law_1.2"}, "bf16", "routing=power_law_1.2"),
        (
            "moe_perf",
            {**MOE, "kernel_source": "moe_torch_flow_nongated", "moe_dtype": "w4a16_mxfp4"},
            "bf16",
            "mlp=ungated;quant=w4a16_mxfp4;routing=balanced",
        ),
        (
            "moe_perf",
            {**MOE, "hidden_size": 2688, "inter_size": 1856, "topk": 6},
            "bf16",
            "mlp=unsaid;routing=balanced",
        ),
        (
            "custom_allreduce_perf",
            {**ALL_REDUCE, "op_name": "all_reduce", "backend": "vllm_eager"},
            "bf16",
            "lane=eager",
        ),
    ],
)
def test_what_the_dimensions_leave_open_is_kept_apart(
    tmp_path: Path, table: str, row: Mapping[str, Any], dtype: str, variant: str | None
) -> None:
    """The activations' format is the row's; weights, cache, routing and lane are its variant."""
    found = _row(tmp_path, table, row)
    assert (dtype, variant) == (found["dtype"], found["variant"])


def test_a_row_says_where_it_is_from(tmp_path: Path) -> None:
    """Engine, version, kernel, device, topology and place in the file."""
    write_table(tmp_path / "comm" / "nccl_perf.parquet", NCCL, {**NCCL, "kernel_source": "NCCL"})
    plan = read_plan(tmp_path)
    expected = {
        "device": "h200_sxm",
        "topology": "h200_hgx",
        "framework": "nccl",
        "framework_version": "0.24.0",
        "kernel": "NCCL",
        "phase": "forward",
        "source_file": "comm/nccl_perf.parquet",
        "source_row": 2,
        "status": "ok",
    }
    found = plan_rows(plan)[1]
    assert expected == {name: found[name] for name in expected}
    assert 64 == len(found["source_hash"])


def test_heads_and_windows_that_a_table_leaves_out_are_the_plain_ones(tmp_path: Path) -> None:
    """0 key heads are as many as query heads; no window column means no window."""
    row = {**ATTENTION, "num_key_value_heads": 0}
    del row["window_size"], row["kv_cache_dtype"]
    found = _row(tmp_path, "context_attention_perf", row)
    assert ("attention_prefill", None, 4) == (
        found["operator"],
        found["variant"],
        found["dims"]["num_kv_heads"],
    )


def test_a_prefill_after_cached_tokens_sees_them(tmp_path: Path) -> None:
    found = _row(tmp_path, "context_attention_perf", {**ATTENTION, "step": 5})
    expected = {"num_seqs": 2, "q_tokens": 16, "kv_tokens": 26, "score_pairs": 2 * (8 * 5 + 36)}
    assert expected == {name: found["dims"][name] for name in expected}


def test_latent_heads_of_older_tables_follow_from_the_ranks(tmp_path: Path) -> None:
    row = {name: value for name, value in MLA.items() if name != "num_heads"}
    assert 16 == _row(tmp_path, "context_mla_perf", row)["dims"]["num_heads"]


def test_groups_beyond_a_node_fill_nodes(tmp_path: Path) -> None:
    found = _row(tmp_path, "nccl_perf", {**NCCL, "num_gpus": 32})
    assert {"devices_per_node": 8, "num_nodes": 4} == {
        name: found["dims"][name] for name in ("devices_per_node", "num_nodes")
    }


@pytest.mark.parametrize(
    "path",
    [
        "data/h200_sxm/gemm/vllm/0.24.0/gemm_perf.parquet",
        "data/h200_sxm/vllm/0.24.0/gemm_perf.parquet",
        "data/h200_sxm/vllm/0.24.0/gemm_perf.txt",
    ],
)
def test_every_layout_and_any_folder_of_it_serves(tmp_path: Path, path: str) -> None:
    """The systems folder, a system's, a version's and the table itself give the same row."""
    table = write_table(tmp_path / path, GEMM)
    for place in (tmp_path, *list(table.relative_to(tmp_path).parents)[:-1], table):
        (row,) = plan_rows(read_plan(tmp_path / place))
        assert ("gemm", "0.24.0") == (row["operator"], row["framework_version"])


@pytest.mark.parametrize("compression", ["zstd", "snappy", "none"])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_compression_and_kind_of_text_do_not_matter(
    tmp_path: Path, compression: str, kind: pa.DataType
) -> None:
    path = write_table(tmp_path / "gemm_perf.parquet", GEMM, GEMM)
    table = parquet.read_table(path)
    for place, field in enumerate(table.schema):
        if field.type == pa.string():
            table = table.set_column(place, field.name, table[field.name].cast(kind))
    parquet.write_table(table, path, compression=compression, row_group_size=1)
    assert ["bf16", "bf16"] == [row["dtype"] for row in plan_rows(read_plan(path))]


def test_repeated_rows_are_repeats(tmp_path: Path, catalog: CatalogService) -> None:
    """All of them are recorded, and a second import changes nothing."""
    path = write_table(tmp_path / "gemm_perf.parquet", GEMM, {**GEMM, "latency": 0.501})
    for _ in range(2):
        plan = read_plan(path)
        list(catalog.record(plan.run, plan.batches))
    rows = read_table(catalog.read_measurements(MeasurementFilter(include_flagged=True)))
    assert [500.0, 501.0] == sorted(rows["latency_us_median"].to_pylist())


def test_a_lent_table_is_recorded_once(tmp_path: Path) -> None:
    """Under the version it was measured with; the borrower only gets a note."""
    vllm = "data/h200_sxm/gemm/vllm"
    folder = tmp_path / vllm
    write_table(folder / "0.24.0" / "gemm_perf.parquet", GEMM)
    (folder / "0.22.0").mkdir()
    (folder / "0.22.0" / "reuse.yaml").write_text(
        "reuse:\n- table: gemm_perf\n  from_version: 0.24.0\n"
    )
    (folder / "0.24.0" / "collection_meta.yaml").write_text(
        "provenance: collected\ntables:\n  gemm_perf:\n    status: partial\n"
    )
    plan = read_plan(tmp_path)
    assert 1 == len(plan_rows(plan))
    assert [
        f"{vllm}/0.22.0/reuse.yaml: gemm_perf is that of version 0.24.0: no rows of its own",
        f"{vllm}/0.24.0/collection_meta.yaml: gemm_perf is partial",
    ] == sorted(plan.notes)
    assert {f"{vllm}/0.24.0/collection_meta.yaml": "provenance collected"} == plan.run.environment


def test_only_the_device_and_model_asked_for_are_read(tmp_path: Path) -> None:
    write_table(tmp_path / "gemm_perf.parquet", GEMM, {**GEMM, "device": "NVIDIA A100-SXM4-80GB"})
    write_table(tmp_path / "mla_context_module_perf.parquet", MLA_MODULE)
    devices = [row["device"] for row in plan_rows(read_plan(tmp_path, device="a100_sxm_80"))]
    assert ["a100_sxm_80"] == devices
    model = "deepseek-ai/DeepSeek-R1"
    operators = [row["operator"] for row in plan_rows(read_plan(tmp_path, model=model))]
    assert ["mla_prefill_module"] == operators


def _zip_of(folder: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, Path("systems") / file.relative_to(folder))
    return path


def test_a_wheel_is_read_as_it_is(tmp_path: Path) -> None:
    """Its rows are those of its folder, and the run says which wheel it was."""
    folder = tmp_path / "unpacked"
    write_table(folder / "data/h200_sxm/gemm/vllm/0.24.0/gemm_perf.parquet", GEMM, GEMM)
    write_table(folder / "data/h100_sxm/moe/vllm/0.24.0/moe_perf.parquet", MOE)
    wheel = _zip_of(folder, tmp_path / "a-1-py3-none-any.whl")
    plan = read_plan(wheel)
    rows = plan_rows(plan)
    assert [r["latency_us_median"] for r in plan_rows(read_plan(folder))] == [
        r["latency_us_median"] for r in rows
    ]
    assert "systems/data/h200_sxm/gemm/vllm/0.24.0/gemm_perf.parquet" == rows[-1]["source_file"]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert digest == plan.run.environment["archive_sha256"]


def test_folders_say_what_columns_leave_out(tmp_path: Path) -> None:
    """Engine, version (of a build, too) and device."""
    version = "dev-1aa0e962b206"
    path = tmp_path / f"data/b300_sxm/gemm/sglang/{version}/gemm_perf.parquet"
    path.parent.mkdir(parents=True)
    row = {**GEMM, "latency": 0.5, "kernel_source": "k", "sample_count": 3}
    parquet.write_table(pa.Table.from_pylist([row]), path)
    for place in (tmp_path, path):
        (found,) = plan_rows(read_plan(place))
        assert ("b300", "sglang", version) == (
            found["device"],
            found["framework"],
            found["framework_version"],
        )


def test_a_file_that_is_there_twice_is_read_once(tmp_path: Path) -> None:
    first = write_table(tmp_path / "comm/nccl/1/nccl_perf.parquet", NCCL)
    other = tmp_path / "comm/trtllm/1/nccl_perf.parquet"
    other.parent.mkdir(parents=True)
    shutil.copy(first, other)
    write_table(tmp_path / "gemm_perf.parquet", GEMM)
    plan = read_plan(tmp_path)
    assert 2 == len(plan_rows(plan))
    assert (
        "comm/trtllm/1/nccl_perf.parquet: the same file as comm/nccl/1/nccl_perf.parquet",
    ) == plan.notes


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "h200"},
        {"options": {"systems": "h200_sxm,l40s"}},
        {"options": {"engines": "vllm/0.24.0"}},
    ],
)
def test_what_is_not_wanted_is_not_read(tmp_path: Path, changes: Mapping[str, Any]) -> None:
    """By its folders, so that it may be broken; collectives are of no engine."""
    system = tmp_path / "data" / "h200_sxm"
    write_table(system / "gemm/vllm/0.24.0/gemm_perf.parquet", GEMM)
    write_table(system / "comm/nccl/2.27/nccl_perf.parquet", NCCL)
    broken = tmp_path / "data/b200_sxm/gemm/vllm/0.19.0/gemm_perf.parquet"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"PAR1")
    plan = read_plan(tmp_path, **changes)
    assert {"gemm", "all_gather"} == {row["operator"] for row in plan_rows(plan)}
    assert () == plan.notes


@pytest.mark.slow
def test_every_table_of_the_wheel_is_read_or_named() -> None:
    """Of the systems with few rows; `FORETOKEN_AISIMULATE_WHEEL` says where the wheel is."""
    wheel = os.environ.get("FORETOKEN_AISIMULATE_WHEEL", "")
    if not wheel:
        pytest.skip("FORETOKEN_AISIMULATE_WHEEL names no wheel")
    plan = read_plan(Path(wheel), options={"systems": "b60,a100_sxm"})
    num_read = sum(batch.rows.num_rows for batch in plan.batches)
    num_raw = sum(table.num_rows for table in plan.raw_tables)
    assert plan.num_rows == num_read + num_raw + plan.remarks.num_passed
    assert num_read > 300_000
    assert not [note for note in plan.notes if "not read: " in note]


@pytest.mark.slow
def test_the_shared_tables_are_read_whole(shared_data: Path) -> None:
    """Every row of a table by one operator, or none of it and the reason for its kind."""
    root = shared_data / "aiconfigurator" / "systems"
    present = {
        path.relative_to(root).as_posix(): parquet.read_metadata(path).num_rows
        - _count_untrue(path)
        for path in root.rglob("*.parquet")
    }
    plan = read_plan(root)
    found: Counter[str] = Counter()
    for batch in plan.batches:
        rows = pa.table(batch.rows)
        found[rows["source_file"][0].as_py()] += rows.num_rows
        assert {"ok"} == set(rows["status"].unique().to_pylist())
    assert {name: present[name] for name in found} == found
    unread = Counter(Path(name).stem for name in present.keys() - found.keys())
    assert unread == _num_tables_without_operator(plan.notes)
    # What there is an operator for is read wherever it stands.
    assert set() == unread.keys() & FAMILIES.keys()


_BLOCKS_BY_TRITON = ("vllm_fused_moe", "fp8_block")


def _count_untrue(path: Path) -> int:
    """Return how many rows of a file timed other kernels than they name, or than engines run."""
    if path.stem == "gemm_perf":
        rows = parquet.read_table(path, columns=["framework", "gemm_dtype"]).to_pylist()
        return sum(row == {"framework": "TRTLLM", "gemm_dtype": "nvfp4"} for row in rows)
    if path.stem != "moe_perf":
        return 0
    rows = parquet.read_table(path).to_pylist()
    is_blackwell = bool({"b200_sxm", "b300_sxm", "gb200", "gb300"} & {*path.parts})
    is_hopper = bool({"h100_sxm", "h200_sxm"} & {*path.parts})
    return sum(
        row["kernel_source"] in ("vllm_marlin_int4_moe", "vllm_flashinfer_trtllm_moe_fp4")
        or (
            (row["kernel_source"], row["moe_dtype"]) == _BLOCKS_BY_TRITON
            and (is_blackwell or (is_hopper and row["moe_ep_size"] > 1))
        )
        for row in rows
    )


def _num_tables_without_operator(notes: Iterable[str]) -> Counter[str]:
    """Return how many tables of a kind the notes leave out: `place and 7 more: kind: why`."""
    left_out = re.compile(r"\S+(?: and (\d+) more)?: (\w+): no operator here is what it measured.*")
    matches = (left_out.fullmatch(note) for note in notes)
    return Counter({match[2]: 1 + int(match[1] or 0) for match in matches if match})
