"""Vidur's times of the host become parts of a step, by batch and degree."""

from pathlib import Path
from typing import Any

import pytest
from import_plans import list_rows, write_csv

from foretoken.catalog.importing import ImportPlan, ImportRequest, find_importer
from foretoken.domain.errors import InvalidRequestError

_PARTS = ("schedule", "sampler_e2e", "prepare_inputs_e2e", "process_model_outputs")
_BATCH = {"model_name": "meta-llama/Llama-2-7b-hf", "batch_size": 8, "tensor_parallel_degree": 2}
_TIMES = {
    **{f"{part}_mean": 0.2 for part in _PARTS},
    **{f"{part}_median": 0.1 for part in _PARTS},
    "ray_comm_time_mean": 3.0,
}


def _host_file(root: Path) -> Path:
    """The place where Vidur's predictor looks, next to an empty profile of the device."""
    (root / "compute" / "a100").mkdir(parents=True)
    return root / "cpu_overhead" / "a100_dgx" / "meta-llama" / "Llama-2-7b-hf" / "cpu_overheads.csv"


def _read(root: Path, **changes: Any) -> ImportPlan:
    return find_importer("vidur").read(ImportRequest(path=root, **changes))


def test_every_part_is_a_host_step(tmp_path: Path) -> None:
    write_csv(_host_file(tmp_path), {"": 0, **_TIMES, **_BATCH})
    rows = list_rows(_read(tmp_path))
    parts = [*_PARTS, "ray_comm_time"]
    assert [("host_step", f"part={part}") for part in parts] == [
        (row["operator"], row["variant"]) for row in rows
    ]
    assert [{"num_seqs": 8, "num_ranks": 2}] * 5 == [row["dims"] for row in rows]
    assert [(100.0, 200.0)] * 4 + [(3000.0, 3000.0)] == [
        (row["latency_us_median"], row["latency_us_mean"]) for row in rows
    ]
    [(device, topology, model)] = {(r["device"], r["topology"], r["model"]) for r in rows}
    assert ("a100_sxm_80", "a100_dgx", "llama-2-7b") == (device, topology, model)


def test_old_files_write_columns_in_capitals(tmp_path: Path) -> None:
    old = {"SCHEDULE_MEDIAN": 0.1, "SAMPLER_LAUNCH_MEDIAN": 0.3, "RAY_COMM_TIME_MEDIAN": 0.2}
    write_csv(_host_file(tmp_path), {**old, **_BATCH, "total_time": 1.0})
    plan = _read(tmp_path)
    assert [("part=schedule", 100.0), ("part=ray_comm_time", 200.0)] == [
        (row["variant"], row["latency_us_median"]) for row in list_rows(plan)
    ]
    assert any("parts that Vidur does not read: sampler_launch" in note for note in plan.notes)


def test_a_file_of_several_models_is_narrowed_to_one(tmp_path: Path) -> None:
    other = {**_BATCH, "model_name": "org/model", "batch_size": 16}
    write_csv(_host_file(tmp_path), {**_TIMES, **_BATCH}, {**_TIMES, **other}, {**_TIMES, **_BATCH})
    assert 15 == len(list_rows(_read(tmp_path)))
    rows = list_rows(_read(tmp_path, model="llama-2-7b"))
    assert {("llama-2-7b", 8)} == {(row["model"], row["dims"]["num_seqs"]) for row in rows}
    assert [1, 3] == sorted({row["source_row"] for row in rows})


def test_a_file_beside_the_layers_has_no_topology(tmp_path: Path) -> None:
    path = tmp_path / "compute" / "a100" / "org" / "model" / "cpu_overhead.csv"
    times = {"schedule_median": 0.1, "batch_size": 4, "tensor_parallel_degree": 1}
    write_csv(path, times)
    [row] = list_rows(_read(tmp_path))
    assert (None, "org/model", 4) == (row["topology"], row["model"], row["dims"]["num_seqs"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "line 2: host_step: num_seqs is 0, below 1"),
        ({"batch_size": "x"}, "line 2: batch_size: 'x' is not a number"),
        ({"BATCH_SIZE": 8}, "columns twice but for capitals"),
    ],
)
def test_a_bad_file_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_csv(_host_file(tmp_path), {**_TIMES, **_BATCH, **changes})
    with pytest.raises(InvalidRequestError, match=f"cpu_overheads.csv.*{message}"):
        _read(tmp_path)
