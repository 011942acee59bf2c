"""Measured training steps from the files that have them."""

from pathlib import Path

import pytest

from foretoken.domain.errors import InvalidRequestError
from foretoken.simulator.validation.training_run import ALL_STAGES, MeasuredComponent, read_run

_EXAMPLE = Path(__file__).resolve().parents[4] / "docs" / "examples" / "measured-steps.csv"

_TRUTH = """\
config_id,job_id,paper_run,pp,component,stage,best_avg_us,prof_avg_us,flags
small,1,0,4,train_batch,first,900000,950000,
small,2,1,4,train_batch,first,1000000,1100000,
small,2,1,4,train_batch,last,1002000,1102000,
small,2,1,4,stage_fwd,middle,5000,5500,
small,2,1,4,optimizer_step,first,7000,,wait_free
small,2,1,4,optimizer_step,last,9000,9000,hand_edited(raw=5);wait_free
large,3,1,2,train_batch,first,9000000,9000000,
"""
_STEPS = """\
config_id,job_id,iteration,elapsed_ms,overflow_skipped
small,1,1,5000,0
small,2,1,3000,0
small,2,2,1040,0
small,2,3,1001,{skipped}
small,2,4,1060,0
small,2,5,9000,0
"""


def _write(folder: Path, text: str, name: str = "steps.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def _part(path: Path, name: str, stage: int) -> MeasuredComponent:
    run = read_run(path, "small")
    (found,) = (item for item in run.components if (item.name, item.stage) == (name, stage))
    return found


def test_a_list_of_times_is_a_run(tmp_path: Path) -> None:
    run = read_run(_write(tmp_path, "time_ms\n100\n104\n99\n"))
    assert ("steps", (), 100.0, 101.0, (100.0, 104.0, 99.0)) == (
        run.name,
        run.components,
        run.step.time_ms,
        run.step.mean_ms,
        run.step.samples_ms,
    )
    assert 0.0262 == pytest.approx(run.step.variation_ratio, abs=1e-4)


def test_flagged_steps_are_left_out_and_flagged_components_kept(tmp_path: Path) -> None:
    text = (
        "component,stage,time_ms,flags\n"
        "step,,900,first step\nstep,,100,\nstep,,102,\n"
        "optimizer,0,7,\noptimizer,0,70,first step\noptimizer,1,9,waits\n"
    )
    run = read_run(_write(tmp_path, text))
    assert (101.0, 1) == (run.step.time_ms, run.num_flagged_steps)
    parts = {item.stage: (item.time_ms, item.flags) for item in run.components}
    assert {0: (7.0, ""), 1: (9.0, "waits")} == parts


def test_the_documented_example_can_be_read() -> None:
    run = read_run(_EXAMPLE, "training")
    assert ALL_STAGES == run.step.stage
    assert (5, 1) == (len(run.step.samples_ms), run.num_flagged_steps)
    assert {"contains waiting", "contains waiting for data", ""} == {
        item.flags for item in run.components
    }


def test_a_file_of_several_scenarios_is_read_by_name(tmp_path: Path) -> None:
    path = _write(tmp_path, "scenario,time_ms\na,10\nb,20\n")
    assert 20.0 == read_run(path, "b").step.time_ms
    with pytest.raises(InvalidRequestError, match="no times of the scenario 'c'; it has a, b"):
        read_run(path, "c")


def test_a_file_without_a_good_step_is_refused(tmp_path: Path) -> None:
    for text in ("component,time_ms\nstage_fwd,3\n", "time_ms,flags\n3,first step\n"):
        with pytest.raises(InvalidRequestError, match="no time of a whole step"):
            read_run(_write(tmp_path, text))


def test_the_published_job_of_a_truth_table_counts(tmp_path: Path) -> None:
    path = _write(tmp_path, _TRUTH, "truth.csv")
    run = read_run(tmp_path, "small")
    assert ("GPUModeling25, job 2", 1001.0, 1101.0) == (
        run.source,
        run.step.time_ms,
        run.step.mean_ms,
    )
    assert 900.0 == read_run(path, "small/1").step.time_ms
    assert (5.0, 5.5) == (
        _part(path, "stage_fwd", 1).time_ms,
        _part(path, "stage_fwd", 1).mean_ms,
    )


def test_only_flags_that_doubt_a_value_count(tmp_path: Path) -> None:
    """Theirs named `wait_free` says that a value is good."""
    path = _write(tmp_path, _TRUTH, "truth.csv")
    assert "" == _part(path, "optimizer", 0).flags
    assert "hand_edited(raw=5)" == _part(path, "optimizer", 3).flags


@pytest.mark.parametrize(("skipped", "expected_ms"), [(0, 1001.0), (1, 1050.0)])
def test_a_fastest_step_that_skipped_its_update_does_not_count(
    tmp_path: Path, skipped: int, expected_ms: float
) -> None:
    _write(tmp_path, _TRUTH, "truth.csv")
    _write(tmp_path, _STEPS.format(skipped=skipped))
    run = read_run(tmp_path, "small")
    assert expected_ms == run.step.time_ms
    # The first step starts the run up, the last writes a profile.
    assert (2 + skipped, 3 - skipped) == (run.num_flagged_steps, len(run.step.samples_ms))


def test_a_truth_table_names_what_it_has(tmp_path: Path) -> None:
    _write(tmp_path, _TRUTH, "truth.csv")
    with pytest.raises(InvalidRequestError, match=r"It has large, small; .* 'other'"):
        read_run(tmp_path, "other")
    with pytest.raises(InvalidRequestError, match=r"has the jobs 1, 2, not 7"):
        read_run(tmp_path, "small/7")


def test_a_value_that_is_no_number_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, _TRUTH.replace("5000,5500", "fast,5500"), "truth.csv")
    with pytest.raises(InvalidRequestError, match="best_avg_us of stage_fwd is no number"):
        read_run(tmp_path, "small")
