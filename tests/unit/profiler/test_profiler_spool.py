"""Rows outlive the process that measured them, and are handed over once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError, StorageFullError
from foretoken.domain.measurements.measurement import Run, RunKind
from foretoken.profiler.recording.spool import RunSpool, find_left_runs

RUN = Run(run_id="r1", kind=RunKind.PROFILE, tool="test", environment={"device": "cpu"})


def row(latency_us: float) -> dict[str, Any]:
    return {
        "operator": "silu",
        "phase": "forward",
        "dtype": "fp32",
        "dims": {"num_tokens": 1, "intermediate": 2},
        "device": "cpu",
        "latency_us_median": latency_us,
        "status": "ok",
        "flags": [],
    }


def opened(folder: Path) -> RunSpool:
    spool = RunSpool(folder, RUN)
    spool.open()
    return spool


def left_medians(folder: Path) -> list[tuple[int, list[float], bool]]:
    """Return index, medians and end of each batch that was left."""
    return [
        (batch.batch_index, pa.table(batch.rows).column("latency_us_median").to_pylist(), last)
        for left in find_left_runs(folder)
        for batch in left.batches()
        for last in [batch.is_last]
    ]


def test_rows_of_a_process_that_died_are_found_with_their_run(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    spool.append(0, row(1.5))
    spool.seal(0, [row(1.5)])
    spool.append(1, row(2.5))
    spool.close()
    (left,) = find_left_runs(tmp_path)
    assert left.run == RUN
    assert left_medians(tmp_path) == [(0, [1.5], False), (1, [2.5], False), (2, [], True)]


def test_acknowledged_batches_are_not_left(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    spool.seal(0, [row(1.0)])
    spool.acknowledge(0)
    spool.append(1, row(2.0))
    spool.close()
    assert left_medians(tmp_path) == [(1, [2.0], False), (2, [], True)]


def test_run_whose_rows_all_arrived_is_left_to_be_completed(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    spool.seal(0, [row(1.0)])
    spool.acknowledge(0)
    spool.close()
    assert left_medians(tmp_path) == [(1, [], True)]


def test_complete_run_leaves_nothing(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    spool.append(0, row(1.0))
    spool.finish()
    assert list(tmp_path.iterdir()) == []


def test_living_process_keeps_its_rows(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    spool.append(0, row(1.0))
    assert left_medians(tmp_path) == []
    spool.close()
    assert left_medians(tmp_path) == [(0, [1.0], False), (1, [], True)]


@given(st.data())
def test_line_cut_short_loses_only_itself(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = opened(folder)
    for latency_us in (1.0, 2.0, 3.0):
        spool.append(0, row(latency_us))
    spool.close()
    (path,) = folder.rglob("*.jsonl")
    content = path.read_bytes()
    size = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:size])
    whole = content[:size].count(b"\n")
    kept = [median for _, medians, _ in left_medians(folder) for median in medians]
    # The last line may be whole but for its end of line.
    assert kept[:whole] == [1.0, 2.0, 3.0][:whole]
    assert len(kept) <= whole + 1


def test_folder_that_cannot_be_read_is_left_aside(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "r1" / "run.json").write_text("{", encoding="utf-8")
    assert left_medians(tmp_path) == []
    assert (tmp_path / "r1").exists()


@pytest.mark.parametrize("run_id", ["../r1", "/r1", "profile-cpu-x/../../..-0-1a", ""])
def test_a_run_whose_id_is_no_name_is_not_kept(run_id: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"run_id: .* is no name"):
        RunSpool(tmp_path / "spool", replace(RUN, run_id=run_id))


def test_the_files_of_a_run_go_and_nothing_that_others_put_beside_them(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    spool.append(0, row(1.5))
    spool.seal(0, [row(1.5)])
    spool.close()
    folder = tmp_path / "r1"
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    (folder / "below").mkdir()
    (folder / "more.jsonl").write_text("mine", encoding="utf-8")
    (left,) = find_left_runs(tmp_path)
    assert 2 == len(list(left.batches()))
    left.finish()
    assert ["below", "more.jsonl", "notes.txt"] == sorted(path.name for path in folder.iterdir())
    assert [] == list(find_left_runs(tmp_path))


def test_a_link_is_no_run_that_was_left(tmp_path: Path) -> None:
    opened(tmp_path / "elsewhere").close()
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "r1").symlink_to(tmp_path / "elsewhere" / "r1")
    assert [] == list(find_left_runs(tmp_path / "spool"))


def test_disk_that_takes_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("a file", encoding="utf-8")
    with pytest.raises(StorageFullError, match="could not be kept"):
        opened(tmp_path / "spool")


def test_floats_come_back_bit_by_bit(tmp_path: Path) -> None:
    value = 0.1 + 0.2
    assert json.loads(json.dumps(value)) == value
    spool = opened(tmp_path)
    spool.append(0, row(value))
    spool.close()
    assert left_medians(tmp_path)[0][1] == [value]
