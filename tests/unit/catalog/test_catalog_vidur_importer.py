"""Vidur's tables become canonical operators, whole or not at all."""

import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from import_plans import list_rows, write_csv

from foretoken.catalog.importing import ImportPlan, ImportRequest, find_importer
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import (
    InvalidRequestError,
    UnknownDeviceError,
    UnknownModelError,
)
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.wire.arrow import read_table

_STATISTICS = ("min", "max", "mean", "median", "std")
_MODEL = {
    "n_head": 8,
    "n_kv_head": 2,
    "n_embd": 1024,
    "n_expanded_embd": 4096,
    "vocab_size": 32000,
    "use_gated_mlp": True,
    "num_tokens": 16,
    "num_tensor_parallel_workers": 1,
}
_BATCH = {
    "n_embd": 1024,
    "n_q_head": 8,
    "n_kv_head": 2,
    "block_size": 16,
    "num_tensor_parallel_workers": 1,
    "max_model_len": 4096,
    "batch_size": 1,
    "prefill_chunk_size": 0,
    "kv_cache_size": 0,
    "is_prefill": False,
    "attention_backend": "AttentionBackend.FLASHINFER",
}
_LINK = {"rank": 0, "num_workers": 2, "size": 2048, "collective": "all_reduce"}


def _times(op: str, ms: float | str = 0.5) -> dict[str, Any]:
    return {f"time_stats.{op}.{statistic}": ms for statistic in _STATISTICS}


def _mlp(root: Path, *rows: Mapping[str, Any], device: str = "a30") -> Path:
    return write_csv(root / "compute" / device / "org" / "model" / "mlp.csv", *rows)


def _attention(root: Path, *rows: Mapping[str, Any]) -> Path:
    return write_csv(root / "compute" / "a30" / "org" / "model" / "attention.csv", *rows)


def _read(root: Path, **changes: Any) -> ImportPlan:
    return find_importer("vidur").read(ImportRequest(path=root, **changes))


@pytest.mark.parametrize(
    ("op", "operator", "dims"),
    [
        ("emb", "embedding", {"num_tokens": 16, "hidden": 1024, "vocab": 16000}),
        ("input_layernorm", "rms_norm", {"num_tokens": 16, "hidden": 1024}),
        ("attn_pre_proj", "gemm", {"m": 16, "n": (8 + 2 * 2) * 128 // 2, "k": 1024}),
        (
            "attn_rope",
            "rope",
            {"num_tokens": 16, "num_heads": 4, "num_kv_heads": 1, "head_dim": 128},
        ),
        ("attn_post_proj", "gemm", {"m": 16, "n": 1024, "k": 512}),
        ("post_attention_layernorm", "rms_norm", {"num_tokens": 16, "hidden": 1024}),
        ("mlp_up_proj", "gemm", {"m": 16, "n": 4096, "k": 1024}),
        ("mlp_act", "silu_mul", {"num_tokens": 16, "intermediate": 2048}),
        ("mlp_down_proj", "gemm", {"m": 16, "n": 1024, "k": 2048}),
        ("add", "residual_add", {"num_tokens": 16, "hidden": 1024}),
    ],
)
def test_an_op_becomes_an_operator_on_one_of_two_ranks(
    op: str, operator: str, dims: dict[str, int], tmp_path: Path
) -> None:
    _mlp(tmp_path, {**_times(op), **_MODEL, "num_tensor_parallel_workers": 2})
    [row] = list_rows(_read(tmp_path))
    assert (operator, dims) == (row["operator"], row["dims"])


def test_times_become_microseconds_with_their_origin(tmp_path: Path) -> None:
    cells = {f"time_stats.add.{s}": ms for s, ms in zip(_STATISTICS, (1, 5, 3, 2, 4), strict=True)}
    _mlp(tmp_path, {**cells, **_MODEL})
    [row] = list_rows(_read(tmp_path))
    times = [row[f"latency_us_{statistic}"] for statistic in _STATISTICS]
    assert [1000.0, 5000.0, 3000.0, 2000.0, 4000.0] == times
    names = ("device", "dtype", "phase", "framework", "status", "source_file", "source_row")
    origin = ("a30", "fp16", "forward", "vllm", "ok", "compute/a30/org/model/mlp.csv", 1)
    assert origin == tuple(row[name] for name in names)


def test_a_plain_mlp_has_one_projection_and_gelu(tmp_path: Path) -> None:
    plain = {**_MODEL, "use_gated_mlp": False}
    ops = ("mlp_up_proj", "mlp_act", "input_layernorm")
    _mlp(tmp_path, {**_times(ops[0]), **_times(ops[1]), **_times(ops[2]), **plain})
    rows = {row["operator"]: row["dims"] for row in list_rows(_read(tmp_path))}
    assert {"gemm", "gelu", "layer_norm"} == set(rows)
    assert 4096 == rows["gemm"]["n"]


def test_ranks_beyond_the_key_heads_hold_a_copy(tmp_path: Path) -> None:
    _mlp(tmp_path, {**_times("attn_pre_proj"), **_MODEL, "num_tensor_parallel_workers": 4})
    assert (2 + 2 * 1) * 128 == list_rows(_read(tmp_path))[0]["dims"]["n"]


def test_a_prefill_and_a_decode_are_told_apart(tmp_path: Path) -> None:
    ops = {**_times("attn_input_reshape", 0.0), **_times("attn_kv_cache_save", 0.003)}
    prefill = {**_times("attn_prefill", 0.4), **_times("attn_decode", 0.0), **_BATCH}
    decode = {**_times("attn_prefill", 0.0), **_times("attn_decode", 0.2), **_BATCH}
    prefill |= {"prefill_chunk_size": 64, "kv_cache_size": 32, "is_prefill": True}
    decode |= {"batch_size": 5, "kv_cache_size": 100}
    _attention(tmp_path, {**ops, **prefill}, {**ops, **decode})
    found = [(row["operator"], row["dims"]) for row in list_rows(_read(tmp_path))]
    heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    pairs = 64 * 32 + 64 * 65 // 2
    chunk = {"num_seqs": 1, "q_tokens": 64, "kv_tokens": 96, "score_pairs": pairs}
    assert [
        ("kv_cache_write", {"num_tokens": 64, "num_kv_heads": 2, "head_dim": 128}),
        ("kv_cache_write", {"num_tokens": 5, "num_kv_heads": 2, "head_dim": 128}),
        ("attention_prefill", {**chunk, **heads}),
        ("attention_decode", {"num_seqs": 5, "kv_tokens": 505, "kv_tokens_max": 101, **heads}),
    ] == found
    assert {"flashinfer"} == {row["kernel"] for row in list_rows(_read(tmp_path))}


def test_a_decode_without_cache_attends_to_its_own_token(tmp_path: Path) -> None:
    _attention(tmp_path, {**_times("attn_decode", 0.2), **_BATCH})
    assert 1 == list_rows(_read(tmp_path))[0]["dims"]["kv_tokens_max"]


@pytest.mark.parametrize(
    ("workers", "per_node", "expected"), [(2, 1, (1, 2)), (2, 2, (2, 1)), (16, 8, (8, 2))]
)
def test_a_collective_spans_nodes(
    workers: int, per_node: int, expected: tuple[int, int], tmp_path: Path
) -> None:
    _mlp(tmp_path, {**_times("add"), **_MODEL}, device="a100")
    link = {**_LINK, "num_workers": workers, "devices_per_node": per_node}
    write_csv(
        tmp_path / "network" / "a100_dgx" / "all_reduce.csv", {**_times("all_reduce"), **link}
    )
    row = list_rows(_read(tmp_path, device="a100"))[-1]
    assert {"message_bytes": 2048, "devices_per_node": expected[0], "num_nodes": expected[1]} == (
        row["dims"]
    )
    assert ("all_reduce", "a100_sxm_80", "a100_dgx") == (
        row["operator"],
        row["device"],
        row["topology"],
    )


def test_an_empty_cell_is_a_failed_row(tmp_path: Path) -> None:
    _mlp(tmp_path, {**_times("add", ""), **_MODEL}, {**_times("add"), **_MODEL, "num_tokens": 32})
    found = [(row["status"], row["status_reason"]) for row in list_rows(_read(tmp_path))]
    assert [("failed", "the source has no time for this row"), ("ok", None)] == found


def test_an_op_that_was_not_profiled_is_no_row(tmp_path: Path) -> None:
    _mlp(tmp_path, {**_times("add"), **_MODEL})
    assert ["residual_add"] == [row["operator"] for row in list_rows(_read(tmp_path))]


def test_an_op_nobody_knows_is_counted_in_the_notes(tmp_path: Path) -> None:
    row = {**_times("add"), **_times("lora"), **_MODEL}
    _mlp(tmp_path, row, {**row, "num_tokens": 32})
    assert ("compute/a30/org/model/mlp.csv: 2 rows of unknown op 'lora'",) == (
        _read(tmp_path).notes
    )


@pytest.mark.parametrize("column", [*_MODEL, "time_stats.add.median"])
def test_a_missing_column_names_file_and_column(column: str, tmp_path: Path) -> None:
    row = {**_times("add"), **_MODEL}
    del row[column]
    _mlp(tmp_path, row)
    with pytest.raises(InvalidRequestError, match=f"mlp.csv: .*{column}"):
        _read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": "many"}, "mlp.csv, line 3: num_tokens: 'many' is not a number"),
        ({"n_embd": 1023}, "mlp.csv, line 3: n_embd: 1023 does not divide by 8"),
        ({"use_gated_mlp": "maybe"}, "line 3: use_gated_mlp: 'maybe' is neither"),
    ],
)
def test_a_bad_cell_names_file_and_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    row = {**_times("add"), **_MODEL}
    _mlp(tmp_path, row, {**row, **changes})
    with pytest.raises(InvalidRequestError, match=message):
        _read(tmp_path)


def test_a_file_that_is_kept_by_git_lfs_is_left_out_loudly(tmp_path: Path) -> None:
    """Upstream's attention.csv are pointers; what is there is imported."""
    _mlp(tmp_path, {**_times("add"), **_MODEL})
    pointer = tmp_path / "compute" / "a30" / "org" / "model" / "attention.csv"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    plan = _read(tmp_path)
    assert ["residual_add"] == [row["operator"] for row in list_rows(plan)]
    [note] = plan.notes
    assert note.startswith("compute/a30/org/model/attention.csv: NOT READ: a Git LFS pointer")


def test_nothing_is_imported_where_git_lfs_keeps_everything(tmp_path: Path) -> None:
    path = _mlp(tmp_path, {**_times("add"), **_MODEL})
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(InvalidRequestError, match=r"nothing to import.*run `git lfs pull`"):
        _read(tmp_path)


def test_nothing_is_half_imported(tmp_path: Path) -> None:
    _mlp(tmp_path, {**_times("add"), **_MODEL})
    _attention(tmp_path, {**_times("attn_decode", 0.2), **_BATCH, "batch_size": "many"})
    with pytest.raises(InvalidRequestError, match=r"attention.csv, line 2: batch_size"):
        _read(tmp_path)


def test_a_network_file_of_another_collective_is_refused(tmp_path: Path) -> None:
    _mlp(tmp_path, {**_times("add"), **_MODEL})
    link = {**_LINK, "collective": "send_recv", "devices_per_node": 1}
    write_csv(
        tmp_path / "network" / "a30_single_gpu" / "all_reduce.csv",
        {**_times("all_reduce"), **link},
    )
    with pytest.raises(InvalidRequestError, match=r"all_reduce.csv, line 2: collective"):
        _read(tmp_path)


def test_folders_are_chosen_by_device_folder_topology_and_model(tmp_path: Path) -> None:
    row = {**_times("add"), **_MODEL}
    for device in ("a30", "a30_clean", "a100"):
        _mlp(tmp_path, row, device=device)
    devices = [row["device"] for row in list_rows(_read(tmp_path))]
    assert ["a100_sxm_80", "a30"] == devices
    clean = _read(tmp_path, device="a30", options={"folder": "a30_clean"})
    assert ["compute/a30_clean/org/model/mlp.csv"] == [r["source_file"] for r in list_rows(clean)]
    assert 1 == len(list_rows(_read(tmp_path, device="a100_sxm_80", model="org/model")))


def test_a_device_is_read_from_one_folder(tmp_path: Path) -> None:
    """Otherwise the same rows would be stored twice."""
    row = {**_times("add"), **_MODEL}
    for device in ("a30", "a30_clean", "a100", "a100_sxm_80", "mystery"):
        _mlp(tmp_path, row, device=device)
    plan = _read(tmp_path)
    assert ["compute/a100/org/model/mlp.csv", "compute/a30/org/model/mlp.csv"] == [
        row["source_file"] for row in list_rows(plan)
    ]
    notes = dict(note.split(": ", maxsplit=1) for note in plan.notes)
    assert {"compute/a30_clean", "compute/a100_sxm_80", "compute/mystery"} == set(notes)
    assert "a version of a30" in notes["compute/a30_clean"]
    assert "a100 is a100_sxm_80 too" in notes["compute/a100_sxm_80"]
    assert "no device of that name" in notes["compute/mystery"]


@pytest.mark.parametrize(
    ("folder", "model"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("llama-3-8b", "llama-3-8b"),
        ("org/model", "org/model"),
        (".", None),
    ],
)
def test_rows_name_the_model_of_their_folder(
    folder: str, model: str | None, tmp_path: Path
) -> None:
    """By its preset where there is one; old profiles have no organisation, the oldest no model."""
    write_csv(tmp_path / "compute" / "a30" / folder / "mlp.csv", {**_times("add"), **_MODEL})
    assert [model] == [row["model"] for row in list_rows(_read(tmp_path))]
    if model:
        assert [model] == [row["model"] for row in list_rows(_read(tmp_path, model=model))]


def test_a_link_out_of_the_import_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "import"
    _mlp(tmp_path, {**_times("add"), **_MODEL})
    (root / "compute").mkdir(parents=True)
    (root / "compute" / "a30").symlink_to(tmp_path / "compute" / "a30")
    with pytest.raises(InvalidRequestError, match=r"nothing to import|leads out of"):
        _read(root)
    (root / "compute" / "a30").unlink()
    (root / "compute" / "a30").mkdir()
    (root / "compute" / "a30" / "mlp.csv").symlink_to("/etc/passwd")
    with pytest.raises(InvalidRequestError, match=r"mlp.csv: leads out of"):
        _read(root)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"device": "a3000"}, UnknownDeviceError, "a3000"),
        ({"device": "h100"}, InvalidRequestError, "has a30, none is h100_sxm"),
        ({"options": {"folder": "a31"}}, InvalidRequestError, "has a30, not a31"),
        ({"topology": "a30_pair"}, InvalidRequestError, "has no a30_pair"),
        ({"model": "org/other"}, UnknownModelError, "org/model"),
    ],
)
def test_what_is_not_there_is_said(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    _mlp(tmp_path, {**_times("add"), **_MODEL})
    with pytest.raises(error, match=message):
        _read(tmp_path, **changes)


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="has no folder compute/"):
        _read(tmp_path)


def test_the_a30_profile_is_imported_and_its_corrupt_rows_are_found(
    catalog: CatalogService, shared_data: Path
) -> None:
    """76 projections of about 2 us are faster than physics, 52 + 42 rows have no time."""
    plan = _read(shared_data / "vidur" / "profiling", device="a30")
    receipts = list(catalog.record(plan.run, plan.batches))
    everything = MeasurementFilter(include_failed=True, include_flagged=True)
    rows = read_table(catalog.read_measurements(everything)).to_pylist()
    assert {
        "all_reduce": 994,
        "attention_decode": 3840,
        "attention_prefill": 652,
        "embedding": 261,
        "gemm": 4 * 261,
        "kv_cache_write": 4492,
        "residual_add": 261,
        "rms_norm": 2 * 261,
        "rope": 261,
        "send_recv": 994,
        "silu_mul": 261,
    } == Counter(row["operator"] for row in rows)
    assert 13582 == plan.num_rows == sum(receipt.num_rows for receipt in receipts)
    corrupt = [row for row in rows if "faster_than_physics" in str(row["flags"])]
    assert (76, {"gemm"}) == (len(corrupt), {row["operator"] for row in corrupt})
    assert all(1.7 < row["latency_us_median"] < 2.4 for row in corrupt)
    assert 52 + 42 == sum(row["status"] == "failed" for row in rows)
    others = [row for row in rows if row["flags"] and row not in corrupt]
    assert [("embedding", 257)] == [(row["operator"], row["source_row"]) for row in others]


def test_the_a30_rows_are_those_of_the_file(shared_data: Path) -> None:
    """Checked by hand: the last of mlp.csv, of one token, and two batches of attention.csv."""
    rows = list_rows(_read(shared_data / "vidur" / "profiling", device="a30"))
    mlp = {
        (row["operator"], *row["dims"].values()): row["latency_us_median"]
        for row in rows
        if row["source_file"].endswith("mlp.csv") and row["source_row"] == 261
    }
    assert pytest.approx(5.344) == mlp["embedding", 1, 3584, 151936]
    assert pytest.approx(3.568) == mlp["residual_add", 1, 3584]
    assert pytest.approx(22.081) == mlp["silu_mul", 1, 18944]
    assert pytest.approx(64.1125) == mlp["gemm", 1, (28 + 2 * 4) * 128, 3584]
    assert pytest.approx(323.586) == mlp["gemm", 1, 2 * 18944, 3584]
    batches = {
        (row["operator"], row["source_row"]): (row["dims"], row["latency_us_median"])
        for row in rows
        if row["source_file"].endswith("attention.csv")
    }
    heads = {"num_heads": 28, "num_kv_heads": 4, "head_dim": 128}
    pairs = 64 * 64 + 64 * 65 // 2
    prefill = {"num_seqs": 1, "q_tokens": 64, "kv_tokens": 128, "score_pairs": pairs, **heads}
    decode = {"num_seqs": 2, "kv_tokens": 66, "kv_tokens_max": 33, **heads}
    assert (prefill, pytest.approx(20.128)) == batches["attention_prefill", 2]
    assert (decode, pytest.approx(13.568)) == batches["attention_decode", 654]


@pytest.mark.parametrize(
    ("options", "num_rows", "max_flagged_ratio"),
    [
        ({"device": "a30", "options": {"folder": "a30_clean"}}, 13582, 0.0),
        ({"device": "a100"}, 27186, 0.02),
        ({"device": "h100"}, 15410, 0.015),
    ],
    ids=["a30_clean", "a100", "h100"],
)
def test_few_good_rows_are_flagged(
    options: dict[str, Any],
    num_rows: int,
    max_flagged_ratio: float,
    catalog: CatalogService,
    shared_data: Path,
) -> None:
    plan = _read(shared_data / "vidur" / "profiling", **options)
    receipts = list(catalog.record(plan.run, plan.batches))
    assert num_rows == sum(receipt.num_rows for receipt in receipts)
    assert sum(receipt.num_flagged for receipt in receipts) <= max_flagged_ratio * num_rows


def test_importing_again_changes_nothing(catalog: CatalogService, shared_data: Path) -> None:
    root = shared_data / "vidur" / "profiling"
    plans = [_read(root, device="a30"), _read(root, device="a30")]
    receipts = [list(catalog.record(plan.run, plan.batches)) for plan in plans]
    was_duplicate = [receipt.was_duplicate for receipt in itertools.chain(*receipts)]
    assert [False] * 4 + [True] * 4 == was_duplicate
