"""Samples of GPUModeling25 become the operators that its scripts ran."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from import_plans import list_rows, write_csv

from foretoken.catalog.importing import ImportPlan, ImportRequest, find_importer
from foretoken.domain.errors import InvalidRequestError, UnknownDeviceError

_GPU = "NVIDIAA100-SXM4-80GB"
# Two ranks, two sequences of eight tokens, four heads of 16 features.
_SIZES = {"mp": 2, "b": 2, "h": 4, "l": 8, "dim": 64}
_TIMES = {"F_dur(us)": 10.5, "B_dur(us)": 21.25}
_TOKENS = 16
_HEADS = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
# 50257 rows in 2 parts, each rounded up to a multiple of 128.
_VOCAB = 25216
# Norms, fused queries-keys-values with bias, projection, both linear layers of the MLP.
_ENCODER = 4 * 64 + 65 * 96 + 32 * 64 + 2 * 64 * 128


def _op(root: Path, op: str, *rows: Mapping[str, Any], cluster: str = "Perlmutter") -> Path:
    return write_csv(root / cluster / "operator" / f"{_GPU}_{op}_fp16.csv", *rows)


def _nccl(root: Path, op: str, *, cluster: str = "Perlmutter", **changes: Any) -> Path:
    row = {"shape": 1000, "nodes": 2, "GPUsPerNode": 4, "dur(us)": 99.5, **changes}
    return write_csv(root / cluster / "nccl" / f"{_GPU}_{op}_fp16_2_4.csv", row)


def _read(path: Path, **changes: Any) -> ImportPlan:
    return find_importer("gpumodeling").read(ImportRequest(path=path, **changes))


@pytest.mark.parametrize(
    ("op", "operator", "dims"),
    [
        ("linear1", "gemm", {"m": _TOKENS, "n": 3 * 64 // 2, "k": 64}),
        ("linear2", "gemm", {"m": _TOKENS, "n": 64, "k": 32}),
        ("linear3", "gemm", {"m": _TOKENS, "n": 128, "k": 64}),
        ("linear4", "gemm", {"m": _TOKENS, "n": 64, "k": 128}),
        ("linear_final", "gemm", {"m": _TOKENS, "n": _VOCAB, "k": 64}),
        ("baddbmm", "batched_gemm", {"batch": 4, "m": 8, "n": 8, "k": 16}),
        ("bmm", "batched_gemm", {"batch": 4, "m": 8, "n": 16, "k": 8}),
        ("softmax", "softmax", {"num_rows": 32, "width": 8}),
        ("ScaledUpperTriangMaskedSoftmax", "causal_softmax", {"num_matrices": 4, "length": 8}),
        ("fillmask", "masked_fill", {"num_matrices": 4, "q_len": 8, "kv_len": 8}),
        (
            "flash_atten",
            "attention_prefill",
            {"num_seqs": 2, "q_tokens": 16, "kv_tokens": 16, "score_pairs": 2 * 8 * 8, **_HEADS},
        ),
        ("RoPE", "rope", {"num_tokens": _TOKENS, **_HEADS}),
        ("layernorm", "layer_norm", {"num_tokens": _TOKENS, "hidden": 64}),
        ("RMSlayernorm", "rms_norm", {"num_tokens": _TOKENS, "hidden": 64}),
        ("res_add", "residual_add", {"num_tokens": _TOKENS, "hidden": 64}),
        ("gelu", "gelu", {"num_tokens": _TOKENS, "intermediate": 128}),
        ("embedding", "embedding", {"num_tokens": _TOKENS, "hidden": 64, "vocab": _VOCAB}),
        ("parallel_cross_entropy_128", "cross_entropy", {"num_tokens": _TOKENS, "vocab": _VOCAB}),
    ],
)
def test_a_name_becomes_an_operator_on_one_of_two_ranks(
    op: str, operator: str, dims: dict[str, int], tmp_path: Path
) -> None:
    _op(tmp_path, op, {**_SIZES, **_TIMES})
    rows = list_rows(_read(tmp_path))
    expected = [(operator, "forward", dims, 10.5), (operator, "backward", dims, 21.25)]
    names = ("operator", "phase", "dims", "latency_us_median")
    assert expected == [tuple(row[name] for name in names) for row in rows]


@pytest.mark.parametrize(
    ("op", "forward", "backward"),
    [
        ("linear1", None, "bias=true;gradients=zero"),
        ("linear2", None, "gradients=zero"),
        ("bmm", None, "gradients=zero"),
        ("flash_atten", "mask=none", "mask=none"),
        ("RoPE", "form=eager", "form=eager"),
        ("RMSlayernorm", "form=eager", "form=eager"),
        ("layernorm", None, None),
    ],
)
def test_a_variant_says_what_was_not_as_in_training(
    op: str, forward: str | None, backward: str | None, tmp_path: Path
) -> None:
    _op(tmp_path, op, {**_SIZES, **_TIMES})
    assert [forward, backward] == [row["variant"] for row in list_rows(_read(tmp_path))]


@pytest.mark.parametrize(
    ("stage", "num_params", "num_tensors"),
    [
        ("first", 3 * _ENCODER + _VOCAB * 64, 28),
        ("middle", 3 * _ENCODER, 27),
        ("last", 3 * _ENCODER + 2 * 64 + 64 * _VOCAB // 2, 30),
    ],
)
def test_an_optimizer_step_counts_the_parameters_of_its_stage(
    stage: str, num_params: int, num_tensors: int, tmp_path: Path
) -> None:
    _op(tmp_path, f"{stage}Stage_optimizer", {"mp": 2, "dim": 64, "encoders": 3, "dur(us)": 7.5})
    [row] = list_rows(_read(tmp_path))
    dims = {"num_params": num_params, "num_tensors": num_tensors}
    assert ("fused_adam", dims, "step=first") == (row["operator"], row["dims"], row["variant"])


def test_an_optimizer_file_may_name_its_parameters(tmp_path: Path) -> None:
    _op(tmp_path, "optimizer", {"num_layers": 2, "param_tensors": 28, "params": 999, "dur": 7.5})
    [row] = list_rows(_read(tmp_path))
    assert ({"num_params": 999, "num_tensors": 28}, 7.5) == (row["dims"], row["latency_us_median"])


def test_sizes_written_as_floats_are_whole_numbers_and_others_are_refused(tmp_path: Path) -> None:
    path = _op(tmp_path, "linear2", {**_SIZES, **_TIMES, "dim": "64.0"})
    assert 64 == list_rows(_read(path))[0]["dims"]["n"]
    _op(tmp_path, "linear2", {**_SIZES, **_TIMES}, {**_SIZES, **_TIMES, "dim": "64.5"})
    with pytest.raises(InvalidRequestError, match=r"line 3: dim: 64\.5 is not a whole number"):
        _read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h": 1}, "line 2: h: 1 does not divide by 2"),
        ({"dim": 62}, "line 2: dim: 62 does not divide by 4"),
        ({"mp": 0}, "line 2: mp: 0 is not from 1 to"),
        ({"l": 2**40}, "line 2: l: 1099511627776 is not from 1 to"),
        ({"b": "x"}, "line 2: b: 'x' is not a number"),
    ],
)
def test_impossible_sizes_are_refused_with_their_line(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _op(tmp_path, "baddbmm", {**_SIZES, **_TIMES, **change})
    with pytest.raises(InvalidRequestError, match=message):
        _read(tmp_path)


def test_a_backward_column_that_repeats_the_forward_one_is_not_a_measurement(
    tmp_path: Path,
) -> None:
    _op(tmp_path, "res_add", {**_SIZES, **_TIMES, "B_dur(us)": 10.5})
    plan = _read(tmp_path)
    assert ["forward"] == [row["phase"] for row in list_rows(plan)]
    assert any("B_dur(us) is a copy of F_dur(us)" in note for note in plan.notes)


def test_a_row_without_a_time_is_a_failed_row(tmp_path: Path) -> None:
    _op(tmp_path, "gelu", {**_SIZES, **_TIMES}, {**_SIZES, "F_dur(us)": 3.5, "B_dur(us)": ""})
    statuses = [(row["phase"], row["status"]) for row in list_rows(_read(tmp_path))]
    assert ("backward", "failed") == statuses[-1]
    assert 3 == sum(status == "ok" for _, status in statuses)


@pytest.mark.parametrize(
    ("op", "operator", "message_bytes"),
    [
        ("allreduce", "all_reduce", 2000),
        ("allreduce_large", "all_reduce", 2000),
        # `shape` is what one of eight ranks brings; the gathered tensor has all of it.
        ("allgather_large", "all_gather", 8 * 2000),
        ("reducescatter_large", "reduce_scatter", 2000),
        ("p2p", "send_recv", 2000),
    ],
)
def test_a_collective_counts_bytes_as_its_operator_does(
    op: str, operator: str, message_bytes: int, tmp_path: Path
) -> None:
    _nccl(tmp_path, op)
    [row] = list_rows(_read(tmp_path))
    dims = {"message_bytes": message_bytes, "devices_per_node": 4, "num_nodes": 2}
    assert (operator, dims) == (row["operator"], row["dims"])
    assert ("a100_perlmutter", 99.5) == (row["topology"], row["latency_us_median"])


def test_any_level_of_the_folder_can_be_imported(tmp_path: Path) -> None:
    file = _nccl(tmp_path, "p2p")
    _op(tmp_path, "gelu", {**_SIZES, **_TIMES})
    levels = (tmp_path, tmp_path / "Perlmutter", file.parent, file)
    assert [3, 3, 1, 1] == [_read(level).num_rows for level in levels]
    names = [list_rows(_read(level))[0]["source_file"] for level in levels]
    assert f"nccl/{file.name}" == names[1]
    assert file.name == names[3]


def test_a_cluster_without_a_topology_needs_one_named(tmp_path: Path) -> None:
    _nccl(tmp_path, "p2p", cluster="Elsewhere")
    with pytest.raises(InvalidRequestError, match=r"p2p_fp16_2_4\.csv: the cluster is none of"):
        _read(tmp_path)
    [row] = list_rows(_read(tmp_path, topology="a100_dgx"))
    assert "a100_dgx" == row["topology"]


def test_a_topology_of_another_device_leaves_the_collectives_out(tmp_path: Path) -> None:
    _nccl(tmp_path, "p2p")
    _op(tmp_path, "gelu", {**_SIZES, **_TIMES})
    plan = _read(tmp_path, topology="gh200_infiniband")
    assert {"gelu"} == {row["operator"] for row in list_rows(plan)}
    assert any("gh200_infiniband is made of gh200" in note for note in plan.notes)


def test_a_group_other_than_the_file_is_named_after_is_refused(tmp_path: Path) -> None:
    _nccl(tmp_path, "allreduce", nodes=4)
    with pytest.raises(InvalidRequestError, match="line 2: nodes: not 2 as in the name"):
        _read(tmp_path)


def test_what_is_no_sample_is_noted_and_not_read(tmp_path: Path) -> None:
    _op(tmp_path, "gelu", {**_SIZES, **_TIMES})
    _op(tmp_path, "moe", {**_SIZES, **_TIMES})
    folder = tmp_path / "Perlmutter" / "operator"
    write_csv(folder / f"{_GPU}.csv", {"GPU": _GPU, "Best_model": "rforest", "Best_config": "{}"})
    write_csv(tmp_path / "truth" / "steps.csv", {"iteration": 1})
    plan = _read(tmp_path)
    assert 2 == plan.num_rows
    texts = ("no operator known here is 'moe'", "regression models", "measured training steps")
    for text in texts:
        assert any(text in note for note in plan.notes)


def test_a_device_narrows_and_an_unknown_gpu_is_named(tmp_path: Path) -> None:
    _op(tmp_path, "gelu", {**_SIZES, **_TIMES})
    with pytest.raises(InvalidRequestError, match="nothing to import"):
        _read(tmp_path, device="gh200")
    write_csv(tmp_path / "NVIDIAGT1030_gelu_fp16.csv", {**_SIZES, **_TIMES})
    with pytest.raises(UnknownDeviceError, match=r"NVIDIAGT1030_gelu_fp16\.csv"):
        _read(tmp_path)


def test_the_shared_set_is_read_whole(shared_data: Path) -> None:
    plan = _read(shared_data / "gpumodeling")
    rows = pa.concat_tables([pa.table(batch.rows) for batch in plan.batches])
    assert 114085 == plan.num_rows
    assert {"ok"} == set(rows["status"].to_pylist())
    counts = Counter(zip(rows["device"].to_pylist(), rows["phase"].to_pylist(), strict=True))
    assert {"a100_sxm_80", "gh200"} == {device for device, _ in counts}
    collectives = Counter(rows["topology"].to_pylist())
    assert {"a100_perlmutter": 28234, "gh200_infiniband": 7395} == {
        name: count for name, count in collectives.items() if name
    }
