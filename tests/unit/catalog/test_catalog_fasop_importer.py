"""FASOP's profiles become the operators that run in them, composite ones flagged."""

import io
import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from import_plans import list_rows

from foretoken.catalog.importing import ImportPlan, ImportRequest, find_importer
from foretoken.domain.errors import InvalidRequestError, UnknownDeviceError, UnknownModelError

_TABLE = np.arange(1.0, 21.0).reshape(2, 10)
_TOKENS = 16
# Two ranks of Llama 3.3 70B.
_HIDDEN, _QUERIES, _KEYS, _MLP, _VOCAB = 8192, 4096, 512, 14336, 128256
_COMPOSITE = "seq_len=16;tp=2"
_CONFIG = {
    "model_name": "meta-llama/Llama-3.3-70B-Instruct",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "micro_batch_size": 4,
    "tp_size": 2,
    "profile_steps": 15,
    "warmup_steps": 10,
}


def _gemm(n: int, k: int) -> dict[str, int]:
    return {"m": _TOKENS, "n": n, "k": k}


def _write(folder: Path, data: Any, name: str = "llama70b_A40_2.npz") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / name, data=data)
    return folder / name


def _write_json(folder: Path, *names: str, **config: Any) -> Path:
    times = {"mean_ms": 2.0, "median_ms": 1.5, "min_ms": 1.0, "max_ms": 4.0}
    combined = {
        "embedding": {**times, "count": 1},
        "modules": [{"name": name, **times, "std_ms": 0.5} for name in names],
        "lm_head": {"mean_ms": 0, "min_ms": 0, "max_ms": 0, "count": 0},
    }
    path = folder / "profile_a.json"
    path.write_text(json.dumps({"config": {**_CONFIG, **config}, "combined_timing": combined}))
    return path


def _read(path: Path, *, options: dict[str, str] | None = None, **changes: str) -> ImportPlan:
    given = {"seq_len": "16", **(options or {})}
    return find_importer("fasop").read(ImportRequest(path=path, options=given, **changes))


@pytest.mark.parametrize(
    ("place", "column", "operator", "dims", "is_composite"),
    [
        (0, "embed", "embedding", {"num_tokens": 16, "hidden": 8192, "vocab": _VOCAB}, True),
        (1, "attn_q", "gemm", _gemm(_QUERIES, _HIDDEN), True),
        (2, "attn_k", "gemm", _gemm(_KEYS, _HIDDEN), False),
        (3, "attn_v", "gemm", _gemm(_KEYS, _HIDDEN), False),
        (4, "attn_o", "gemm", _gemm(_HIDDEN, _QUERIES), True),
        (5, "mlp_gate", "gemm", _gemm(_MLP, _HIDDEN), True),
        (6, "mlp_act_fn", "silu", {"num_tokens": 16, "intermediate": _MLP}, False),
        (7, "mlp_up", "gemm", _gemm(_MLP, _HIDDEN), False),
        (8, "mlp_down", "gemm", _gemm(_HIDDEN, _MLP), True),
        # The head is not split.
        (9, "lm_head", "gemm", _gemm(_VOCAB, _HIDDEN), True),
    ],
)
def test_a_column_becomes_its_operator(
    place: int,
    column: str,
    operator: str,
    dims: dict[str, int],
    is_composite: bool,
    tmp_path: Path,
) -> None:
    _write(tmp_path, _TABLE)
    rows = [row for row in list_rows(_read(tmp_path)) if row["kernel"] == f"fasop:{column}"]
    assert [1000.0 * (place + 1), 1000.0 * (place + 11)] == [r["latency_us_mean"] for r in rows]
    first, second = rows
    assert (operator, dims) == (first["operator"], first["dims"])
    tokens = "m" if operator == "gemm" else "num_tokens"
    assert 2 * _TOKENS == second["dims"][tokens]
    assert (_COMPOSITE if is_composite else None) == first["variant"]
    assert is_composite == bool(first["flags"])


def test_rows_say_where_they_are_from_and_what_was_assumed(tmp_path: Path) -> None:
    _write(tmp_path, _TABLE)
    names = ("device", "model", "dtype", "framework", "source_file")
    expected = ("a40", "llama-3.3-70b", "fp32", "pytorch", "llama70b_A40_2.npz")
    rows = list_rows(_read(tmp_path))
    assert {expected} == {tuple(row[name] for name in names) for row in rows}
    assert {1, 2} == {row["source_row"] for row in rows}
    assert {"bf16"} == {
        row["dtype"] for row in list_rows(_read(tmp_path, options={"dtype": "bf16"}))
    }


def test_a_cell_without_a_number_is_a_failed_row(tmp_path: Path) -> None:
    table = _TABLE.copy()
    table[1, 2] = np.nan
    _write(tmp_path, table)
    failed = [row["kernel"] for row in list_rows(_read(tmp_path)) if row["status"] == "failed"]
    assert ["fasop:attn_k"] == failed


@pytest.mark.parametrize("seq_len", ["", "0", "-1", "many", "1e3"])
def test_the_length_of_sequences_must_be_given(seq_len: str, tmp_path: Path) -> None:
    _write(tmp_path, _TABLE)
    with pytest.raises(InvalidRequestError, match="seq_len"):
        _read(tmp_path, options={"seq_len": seq_len})


def test_names_that_are_not_known_here_need_options(tmp_path: Path) -> None:
    path = _write(tmp_path, _TABLE, "bert_T4_2.npz")
    with pytest.raises(UnknownDeviceError, match=r"bert_T4_2\.npz"):
        _read(path)
    with pytest.raises(UnknownModelError, match=r"bert_T4_2\.npz"):
        _read(path, device="a40")
    first = list_rows(_read(path, device="a40", model="llama-3.3-70b"))[0]
    assert ("a40", "llama-3.3-70b") == (first["device"], first["model"])


def test_files_of_another_device_or_model_are_left_out(tmp_path: Path) -> None:
    _write(tmp_path, _TABLE)
    _write(tmp_path, _TABLE, "llama70b_A100_2.npz")
    plan = _read(tmp_path, device="a40")
    assert {"a40"} == {row["device"] for row in list_rows(plan)}
    assert any("not read: it is of llama-3.3-70b on a100_sxm_40" in note for note in plan.notes)


def test_a_degree_that_does_not_split_the_model_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, _TABLE, "llama70b_A40_3.npz")
    with pytest.raises(InvalidRequestError, match="does not split evenly over 3 ranks"):
        _read(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.ones((2, 9)), "an array of shape"),
        (np.ones(10), "an array of shape"),
        (np.ones((0, 10)), "an array of shape"),
        (np.array([["a"] * 10]), "not of numbers"),
        (np.array([[None] * 10], dtype=object), "Python objects"),
    ],
)
def test_another_array_is_refused(data: Any, message: str, tmp_path: Path) -> None:
    _write(tmp_path, data)
    with pytest.raises(InvalidRequestError, match=message):
        _read(tmp_path)


def _zip(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def _npy(data: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, data)
    return buffer.getvalue()


def test_archives_that_are_no_profile_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "llama70b_A40_2.npz"
    for members, message in (
        ({"../data.npy": _npy(_TABLE)}, "leads out of the archive"),
        ({"data.npy": _npy(_TABLE), "more.npy": _npy(_TABLE)}, "not one array named 'data'"),
        ({"data.npy": bytes(1 << 22)}, "max_bytes"),
    ):
        _zip(path, members)
        with pytest.raises(InvalidRequestError, match=message):
            _read(path, options={"max_bytes": str(1 << 20)})
    path.write_bytes(b"not a zip file")
    with pytest.raises(InvalidRequestError, match="not a ZIP file"):
        _read(path)


def test_a_legacy_profile_has_embedding_layer_and_head(tmp_path: Path) -> None:
    np.save(tmp_path / "gpt2XL_A40_1.npy", np.array([2.0, *[3.0] * 48, 4.0]))
    rows = list_rows(_read(tmp_path))
    expected = [
        ("embedding", "fasop:embedding_layer", 2000.0),
        ("gemm", "fasop:transformer_layer", 3000.0),
        ("gemm", "fasop:post_process", 4000.0),
    ]
    names = ("operator", "kernel", "latency_us_median")
    assert expected == [tuple(row[name] for name in names) for row in rows]
    assert all(row["flags"] for row in rows)
    np.save(tmp_path / "gpt2XL_A40_1.npy", np.array([2.0, 3.0, 4.0]))
    with pytest.raises(InvalidRequestError, match="gpt2-xl has embedding, 48 layers and head"):
        _read(tmp_path)


def test_a_profile_json_has_a_row_for_every_module_and_rank(tmp_path: Path) -> None:
    names = ["model_layers_0_mlp_up_proj"] * 2 + ["model_layers_1_mlp_up_proj"]
    path = _write_json(tmp_path, *names)
    with pytest.raises(InvalidRequestError, match="give --device"):
        _read(path)
    embed, *modules = list_rows(_read(path, device="a40"))
    assert ["fasop:embed"] == [embed["kernel"]]
    assert [2, 3, 4] == [row["source_row"] for row in modules]
    times = [modules[0][f"latency_us_{name}"] for name in ("median", "mean", "min", "max", "std")]
    assert [1500.0, 2000.0, 1000.0, 4000.0, 500.0] == times
    assert (4 * _TOKENS, _MLP, 5) == (
        modules[0]["dims"]["m"],
        modules[0]["dims"]["n"],
        modules[0]["num_samples"],
    )


@pytest.mark.parametrize(
    ("names", "config", "message"),
    [
        (("model_layers_0_rotary",), {}, r"modules\[0\]: 'model_layers_0_rotary' is no module"),
        ((), {"hidden_size": 4096}, "config.hidden_size is 4096; llama-3.3-70b has 8192"),
        ((), {"micro_batch_size": "x"}, "config.micro_batch_size: 'x' is no count"),
        ((), {"tp_size": 10**9}, "config.tp_size: 1000000000 is no count"),
    ],
)
def test_a_profile_json_that_fits_no_model_is_refused(
    names: tuple[str, ...], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = _write_json(tmp_path, *names, **config)
    with pytest.raises(InvalidRequestError, match=message):
        _read(path, device="a40")


def test_results_of_a_search_are_described_and_not_stored(tmp_path: Path) -> None:
    _write(tmp_path, _TABLE)
    (tmp_path / "plans.csv").write_text(
        "mbs,tp,dp,pp,partition,step_time(s),is_oom\n"
        '1,2,1,4,"[3, 2]",5.25,False\n1,4,1,2,"[3, 2]",9.5,True\n'
    )
    (tmp_path / "sweep.csv").write_text(
        "model,micro_batch_size,pp,tp,dp,status,elapsed_sec\n70b,1,2,8,1,SUCCESS,850\n"
        "70b,2,2,8,1,OOM,90\n"
    )
    plan = _read(tmp_path)
    assert 20 == plan.num_rows
    assert any("2 plans" in note and "5.25 to 9.5 s" in note for note in plan.notes)
    assert any("1 OOM, 1 SUCCESS" in note for note in plan.notes)
    with pytest.raises(InvalidRequestError, match="nothing to import"):
        _read(tmp_path / "plans.csv")


def test_the_shared_set_is_read_whole(shared_data: Path) -> None:
    plan = _read(shared_data / "fasop", device="a40", options={"seq_len": "120"})
    rows = list_rows(plan)
    counts = Counter(Path(row["source_file"]).suffix for row in rows)
    assert {".npz": 180, ".json": 514} == dict(counts)
    assert {"ok"} == {row["status"] for row in rows}
    # Four of ten columns hold their operator alone.
    plain = [row for row in rows if not row["flags"] and row["source_file"].endswith(".npz")]
    assert 4 * 18 == len(plain)
