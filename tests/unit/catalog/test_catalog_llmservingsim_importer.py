"""LLMServingSim's tables become canonical operators by the model's dimensions and the degree."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from import_plans import list_rows

from foretoken.catalog.importing import ImportPlan, ImportRequest, find_importer
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import (
    InvalidRequestError,
    UnknownDeviceError,
    UnknownModelError,
)
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.wire.arrow import read_table

_META = {
    "vllm_version": "0.19.0",
    "cuda_version": "'12.8'",
    "gpu": "NVIDIA GeForce RTX 4090",
    "hardware": "RTX4090",
    "model": "meta-llama/Llama-3.1-8B",
    "measurement_iterations": 3,
}
_LLAMA = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
_COLLECTIVE = {
    "framework": "TRTLLM",
    "version": "2.29.2",
    "device": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "op_name": "alltoall",
    "kernel_source": "NCCL",
    "nccl_dtype": "half",
    "num_gpus": 4,
    "message_elements": 512,
    "latency_ms": 0.02,
}


def _csv(folder: Path, name: str, *rows: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [",".join(rows[0]), *(",".join(str(cell) for cell in row.values()) for row in rows)]
    (folder / name).write_text("\n".join(lines) + "\n")


def _variant(root: Path, **changes: Any) -> Path:
    """Write a meta.yaml; return its folder."""
    folder = root / "perf" / "RTX4090" / "meta-llama" / "Llama-3.1-8B" / "bf16"
    folder.mkdir(parents=True, exist_ok=True)
    meta = {key: value for key, value in {**_META, **changes}.items() if value is not None}
    (folder / "meta.yaml").write_text("".join(f"{key}: {value}\n" for key, value in meta.items()))
    return folder


def _dense(folder: Path, *rows: tuple[str, int, float | str]) -> None:
    named = [dict(zip(("layer", "tokens", "time_us"), row, strict=True)) for row in rows]
    _csv(folder, "dense.csv", *named)


def _grid(*cells: float) -> dict[str, float]:
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    return dict(zip(names, cells, strict=True))


def _skew(*cells: float) -> dict[str, float]:
    names = ("pc", "kp", "n", "nb", "kvs", "kv_big", "t_mean_us", "t_max_us", "t_skew_us")
    return dict(zip(names, cells, strict=True))


def _read(root: Path, **changes: Any) -> ImportPlan:
    return find_importer("llmservingsim").read(ImportRequest(path=root, **changes))


@pytest.mark.parametrize(
    ("layer", "operator", "dims"),
    [
        ("embedding", "embedding", {"num_tokens": 7, "hidden": 4096, "vocab": 64128}),
        ("qkv_proj", "gemm", {"m": 7, "n": 3072, "k": 4096}),
        (
            "rotary_emb",
            "rope",
            {"num_tokens": 7, "num_heads": 16, "num_kv_heads": 4, "head_dim": 128},
        ),
        ("o_proj", "gemm", {"m": 7, "n": 4096, "k": 2048}),
        ("gate_up_proj", "gemm", {"m": 7, "n": 14336, "k": 4096}),
        ("act_fn", "silu_mul", {"num_tokens": 7, "intermediate": 7168}),
        ("down_proj", "gemm", {"m": 7, "n": 4096, "k": 7168}),
        ("final_layernorm", "add_rms_norm", {"num_tokens": 7, "hidden": 4096}),
    ],
)
def test_a_layer_becomes_an_operator_on_one_of_two_ranks(
    layer: str, operator: str, dims: dict[str, int], tmp_path: Path
) -> None:
    _dense(_variant(tmp_path) / "tp2", (layer, 7, 12.5))
    [row] = list_rows(_read(tmp_path))
    assert (operator, dims, None) == (row["operator"], row["dims"], row["flags"])
    names = ("device", "dtype", "framework", "framework_version", "num_samples")
    assert ("rtx_4090", "bf16", "vllm", "0.19.0", 3) == tuple(row[name] for name in names)
    assert 12.5 == row["latency_us_median"] == row["latency_us_mean"]


def test_the_head_and_the_sampler_count_sequences(tmp_path: Path) -> None:
    """Each rank has its part of the vocabulary, and samples from all of it."""
    rows = [{"layer": name, "sequences": 5, "time_us": 9} for name in ("lm_head", "sampler")]
    _csv(_variant(tmp_path) / "tp2", "per_sequence.csv", *rows)
    found = [row["dims"] for row in list_rows(_read(tmp_path))]
    assert [{"m": 5, "n": 64128, "k": 4096}, {"num_seqs": 5, "vocab": 128256}] == found


@pytest.mark.parametrize(("layer", "num_rows"), [("layernorm", 10), ("qk_norm", 10 * 20)])
def test_means_of_unlike_calls_are_flagged(layer: str, num_rows: int, tmp_path: Path) -> None:
    _dense(_variant(tmp_path) / "tp1", (layer, 10, 3.0))
    [row] = list_rows(_read(tmp_path))
    assert num_rows == row["dims"]["num_tokens"]
    assert row["flags"][0].startswith("mean_of_calls: ")


def test_rows_copied_from_the_lowest_degree_are_left_out(tmp_path: Path) -> None:
    folder = _variant(tmp_path)
    _dense(folder / "tp1", ("final_layernorm", 1, 2.5), ("o_proj", 1, 20.0))
    _dense(folder / "tp2", ("final_layernorm", 1, 2.5), ("o_proj", 1, 11.0))
    plan = _read(tmp_path)
    found = Counter(row["source_file"].split("/")[-2] for row in list_rows(plan))
    assert {"tp1": 2, "tp2": 1} == found
    assert "1 rows of final_layernorm are copied from the lowest degree" in plan.notes[0]


def test_a_layer_nobody_knows_is_counted_in_the_notes(tmp_path: Path) -> None:
    _dense(_variant(tmp_path) / "tp1", ("o_proj", 1, 2.0), ("hyena", 1, 2.0), ("hyena", 2, 2.0))
    plan = _read(tmp_path)
    assert 1 == plan.num_rows
    assert "tp1/dense.csv: 2 rows of the unknown layer 'hyena' are not read" in plan.notes[0]


def test_batches_are_prefill_decode_or_mixed(tmp_path: Path) -> None:
    rows = (_grid(16, 32, 0, 0, 5.0), _grid(0, 0, 4, 99, 6.0), _grid(16, 0, 4, 99, 7.0))
    _csv(_variant(tmp_path) / "tp1", "attention.csv", *rows)
    found = [(row["operator"], row["dims"]) for row in list_rows(_read(tmp_path))]
    cached = {"num_seqs": 1, "q_tokens": 16, "kv_tokens": 48, "score_pairs": 16 * 32 + 136}
    fresh = {"num_seqs": 1, "q_tokens": 16, "kv_tokens": 16, "score_pairs": 136}
    decode = {"num_seqs": 4, "kv_tokens": 400, "kv_tokens_max": 100}
    mixed = {"num_decode_seqs": 4, "decode_kv_tokens": 400, "decode_kv_tokens_max": 100}
    assert [
        ("attention_prefill", {**cached, **_LLAMA}),
        ("attention_decode", {**decode, **_LLAMA}),
        ("attention_mixed", {**fresh, **mixed, **_LLAMA}),
    ] == found


@pytest.mark.parametrize("iterations", [1, 3])
def test_skew_times_are_sums_or_means_as_the_even_batches_say(
    iterations: int, tmp_path: Path
) -> None:
    folder = _variant(tmp_path) / "tp1"
    _csv(folder, "attention.csv", _grid(0, 0, 4, 400, 20.0))
    skew = _skew(0, 0, 4, 1, 100, 400, 0, 20.2 * iterations, 12.0 * iterations)
    _csv(folder, "skew.csv", skew)
    row = list_rows(_read(tmp_path))[-1]
    dims = {"num_seqs": 4, "kv_tokens": 401 + 3 * 101, "kv_tokens_max": 401}
    assert ("attention_decode", {**dims, **_LLAMA}) == (row["operator"], row["dims"])
    assert pytest.approx(12.0) == row["latency_us_median"]


def test_skew_times_of_no_known_scale_are_left_out(tmp_path: Path) -> None:
    folder = _variant(tmp_path) / "tp1"
    _csv(folder, "attention.csv", _grid(0, 0, 4, 400, 20.0))
    _csv(folder, "skew.csv", _skew(0, 0, 4, 1, 100, 400, 0, 40.0, 24.0))
    plan = _read(tmp_path)
    assert 1 == plan.num_rows
    assert any("its times are 2 times those of attention.csv" in note for note in plan.notes)


def test_experts_take_their_dims_from_the_model(tmp_path: Path) -> None:
    folder = _variant(tmp_path, model="Qwen/Qwen3-30B-A3B-Instruct-2507") / "tp2"
    _csv(folder, "moe.csv", {"tokens": 4, "activated_experts": 16, "time_us": 100})
    [row] = list_rows(_read(tmp_path))
    assert {
        "num_tokens": 4,
        "top_k": 8,
        "num_experts": 128,
        "num_active_experts": 16,
        "hidden": 2048,
        "intermediate": 384,
    } == row["dims"]
    assert ("qwen3-30b-a3b", None) == (row["model"], row["variant"])


def test_experts_of_a_dense_model_are_refused(tmp_path: Path) -> None:
    folder = _variant(tmp_path) / "tp1"
    _csv(folder, "moe.csv", {"tokens": 4, "activated_experts": 16, "time_us": 100})
    with pytest.raises(InvalidRequestError, match=r"moe.csv: llama-3.1-8b has no experts"):
        _read(tmp_path)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("half", 1024), ("int8", 512)])
def test_a_collective_counts_elements_of_its_format(
    dtype: str, num_bytes: int, tmp_path: Path
) -> None:
    _dense(_variant(tmp_path) / "tp1", ("o_proj", 1, 20.0))
    _csv(tmp_path / "collectives", "nccl.csv", {**_COLLECTIVE, "nccl_dtype": dtype})
    row = list_rows(_read(tmp_path))[-1]
    assert {"message_bytes": num_bytes, "devices_per_node": 4, "num_nodes": 1} == row["dims"]
    names = ("operator", "topology", "framework", "framework_version", "kernel")
    expected = ("all_to_all", "rtx_pro_6000_pcie", "nccl", "2.29.2", "nccl")
    assert expected == tuple(row[name] for name in names)
    assert 20.0 == row["latency_us_median"]


def test_an_empty_cell_is_a_failed_row(tmp_path: Path) -> None:
    _dense(_variant(tmp_path) / "tp1", ("o_proj", 1, ""), ("o_proj", 2, 9.0))
    assert ["failed", "ok"] == [row["status"] for row in list_rows(_read(tmp_path))]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "org/nobody"}, UnknownModelError, "meta.yaml: unknown model 'org/nobody'"),
        ({"gpu": "Voodoo 2"}, UnknownDeviceError, "meta.yaml: unknown device 'Voodoo 2'"),
        ({"gpu": None}, InvalidRequestError, "meta.yaml: gpu is missing"),
        ({"vllm_version": None}, InvalidRequestError, "meta.yaml: vllm_version is missing"),
        (
            {"engine_effective": "{hf_overrides: {vocab_size: 1000}}"},
            InvalidRequestError,
            "meta.yaml: hf_overrides: vocab_size is 1000, llama-3.1-8b on 1 ranks has 128256",
        ),
        (
            {"measurement_iterations": "often"},
            InvalidRequestError,
            "meta.yaml: measurement_iterations is 'often', not a count",
        ),
        ({"engine_effective": "[1]"}, InvalidRequestError, "hf_overrides is no mapping"),
        ({"engine_effective": "{hf_overrides: 1}"}, InvalidRequestError, "is no mapping"),
        ({"gpu": "&a [*a]"}, InvalidRequestError, "meta.yaml: line .*: a YAML alias"),
    ],
)
def test_a_meta_file_that_does_not_fit_is_said(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    _dense(_variant(tmp_path, **changes) / "tp1", ("o_proj", 1, 20.0))
    with pytest.raises(error, match=message):
        _read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid x\n", "dense.csv is a Git LFS pointer"),
        ("layer,tokens\no_proj,1\n", "dense.csv: missing columns time_us"),
        ("layer,tokens,time_us\no_proj,1,fast\n", "dense.csv, line 2: time_us: 'fast' is not"),
    ],
)
def test_nothing_is_half_imported(
    text: str, message: str, catalog: CatalogService, tmp_path: Path
) -> None:
    folder = _variant(tmp_path)
    _csv(folder / "tp1", "attention.csv", _grid(0, 0, 4, 400, 20.0))
    _dense(folder / "tp2", ("o_proj", 1, 20.0))
    (folder / "tp2" / "dense.csv").write_text(text)
    with pytest.raises(InvalidRequestError, match=message):
        _read(tmp_path)
    assert () == catalog.list_runs()


def test_variants_are_chosen_by_device_and_model(tmp_path: Path) -> None:
    _dense(_variant(tmp_path) / "tp1", ("o_proj", 1, 20.0))
    assert 1 == _read(tmp_path, device="rtx_4090", model="llama-3.1-8b").num_rows
    with pytest.raises(InvalidRequestError, match="nothing of a30 among"):
        _read(tmp_path, device="a30")
    with pytest.raises(InvalidRequestError, match=r"no meta.yaml"):
        _read(tmp_path / "perf" / "RTX4090" / "meta-llama" / "Llama-3.1-8B" / "bf16" / "tp1")


def test_the_whole_profile_is_read(shared_data: Path) -> None:
    plan = _read(shared_data / "llmservingsim")
    assert 225012 == plan.num_rows
    rows = list_rows(_read(shared_data / "llmservingsim", device="rtx_4090"))
    assert {
        "add_rms_norm": 304,
        "attention_decode": 99 + 327,
        "attention_mixed": 8448 + 12682,
        "attention_prefill": 96,
        "embedding": 152,
        "gemm": 4 * 152 + 40,
        "rope": 152,
        "sampler": 40,
        "silu_mul": 152,
    } == Counter(row["operator"] for row in rows)
    assert 7 == len([note for note in plan.notes if "and" in note])


def test_few_good_rows_of_the_rtx_4090_are_flagged(
    catalog: CatalogService, shared_data: Path
) -> None:
    """Only the 152 means of unlike norms, which come flagged."""
    plan = _read(shared_data / "llmservingsim", device="rtx_4090")
    receipts = list(catalog.record(plan.run, plan.batches))
    assert 152 == sum(receipt.num_flagged for receipt in receipts)
    selection = MeasurementFilter(device="rtx_4090")
    assert plan.num_rows - 152 == read_table(catalog.read_measurements(selection)).num_rows


def test_rows_are_those_of_the_files(shared_data: Path) -> None:
    """Checked by hand: attention.csv lines 2 and 3, skew.csv line 2, dense.csv line 2."""
    rows = list_rows(_read(shared_data / "llmservingsim", device="rtx_4090"))
    by_origin = {
        (row["source_file"].rsplit("/", maxsplit=1)[-1], row["source_row"]): row for row in rows
    }
    act = by_origin["dense.csv", 1]
    assert ("silu_mul", 2.592) == (act["operator"], act["latency_us_median"])
    decode = by_origin["attention.csv", 2]
    even = {"num_seqs": 1, "kv_tokens": 33, "kv_tokens_max": 33}
    assert ({**even, **_LLAMA}, 9.34367) == (decode["dims"], decode["latency_us_median"])
    skew = by_origin["skew.csv", 1]
    ragged = {"num_seqs": 2, "kv_tokens": 513 + 129, "kv_tokens_max": 513}
    time_us = pytest.approx(53.343 / 3)
    assert ({**ragged, **_LLAMA}, time_us) == (skew["dims"], skew["latency_us_median"])
