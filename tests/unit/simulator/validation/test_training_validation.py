"""A comparison of training steps finds the error that was put in, and scores nothing flagged."""

from dataclasses import replace
from html import unescape
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_structure import without_scripts
from trained_runs import NUM_STAGES, SCENARIO, TIMES, measure, simulate, step_ms

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.results.report import Feasibility
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.report.page import render_page
from foretoken.simulator.validation.training import TrainingValidation, validate_training
from foretoken.simulator.validation.training_comparison import (
    REST,
    WAITING,
    forward_share,
    score_runs,
    split_step,
)
from foretoken.simulator.validation.training_page import training_validation_sections


def _slower(name: str, factor: float) -> dict[str, float]:
    return {**TIMES, name: factor * TIMES[name]}


def _texts(validation: TrainingValidation) -> str:
    return "\n".join(finding.text for finding in validation.findings)


def test_a_perfect_simulation_has_no_error() -> None:
    validation = validate_training(measure(), simulate(), SCENARIO)
    assert 0.0 == validation.step.error_ratio
    assert {0.0} == {row.error_ratio for row in validation.components}
    assert {0.0} == {score.mape_ratio for score in validation.scores}
    assert validation.proportions["measured"] == validation.proportions["simulated"]
    assert ["step"] == [finding.component for finding in validation.findings]


@pytest.mark.parametrize("name", ["stage_fwd", "stage_bwd", "pp_p2p", "dp_allreduce", "optimizer"])
def test_the_component_that_is_off_explains_the_step(name: str) -> None:
    factor = 40.0 if name == "pp_p2p" else 2.0
    validation = validate_training(measure(), simulate(_slower(name, factor)), SCENARIO)
    first = validation.contributions[0]
    assert name == first.name
    assert validation.step.error_ms == pytest.approx(first.error_ms)
    assert 1.0 == pytest.approx(first.share_ratio)
    assert "too long (100% of what is off)" in _texts(validation)


def test_the_gathering_of_parameters_is_told_apart_from_the_optimizer() -> None:
    slower = {**_slower("dp_allgather", 2.0), "optimizer": TIMES["optimizer"] + 8.0}
    validation = validate_training(measure(), simulate(slower), SCENARIO)
    assert "dp_allgather" == validation.contributions[0].name


def test_layers_stand_for_stages_that_were_not_measured() -> None:
    run = measure()
    some = tuple(item for item in run.components if item.name.startswith("encoder"))
    validation = validate_training(
        replace(run, components=some), simulate(_slower("encoder_bwd", 2.0)), SCENARIO
    )
    assert {"encoder_fwd", "encoder_bwd", REST} == {item.name for item in validation.contributions}
    # 11 passes of two layers that take 9 ms more, though the step has nothing of it.
    found = {item.name: item.error_ms for item in validation.contributions}
    assert (198.0, -198.0) == (found["encoder_bwd"], found[REST])


def test_a_flagged_row_is_shown_and_never_scored() -> None:
    flags = {("optimizer", stage): "contains waiting" for stage in range(1, NUM_STAGES)}
    report = simulate(_slower("optimizer", 3.0))
    validation = validate_training(measure(flags=flags), report, SCENARIO)
    score = next(item for item in validation.scores if item.name == "optimizer")
    assert (1, 3) == (score.num_scored, score.num_flagged)
    assert "shown and not scored: 3 rows" in _texts(validation)
    page = unescape(render_page("", training_validation_sections([validation])))
    assert 3 == page.count("(+200.0%)")
    everything = {("optimizer", stage): "edited" for stage in range(NUM_STAGES)}
    unscored = validate_training(measure(flags=everything), report, SCENARIO)
    assert "optimizer" not in {item.name for item in unscored.contributions}
    assert 0.0 == unscored.scores[-1].mape_ratio


def test_what_the_simulation_lacks_is_flagged_so() -> None:
    report = simulate()
    some = tuple(item for item in report.components if item.name != "pp_p2p")
    validation = validate_training(measure(), replace(report, components=some), SCENARIO)
    rows = [row for row in validation.components if row.name == "pp_p2p"]
    assert {"not simulated"} == {row.flags for row in rows}


def test_steps_alone_are_enough() -> None:
    run = replace(measure(), components=())
    validation = validate_training(run, simulate(_slower("stage_fwd", 1.5)), SCENARIO)
    assert (0, 0, {}) == (
        len(validation.components),
        len(validation.contributions),
        validation.proportions,
    )
    assert "whole steps only" in _texts(validation)
    titles = [section.title for section in training_validation_sections([validation])]
    assert ["What the comparison says", "Stability"] == titles


def test_steps_that_vary_are_said_to() -> None:
    step = measure().step
    unsteady = replace(step, samples_ms=(300.0, 400.0, 500.0))
    validation = validate_training(replace(measure(), step=unsteady), simulate(), SCENARIO)
    assert "vary by 25%" in _texts(validation)
    assert (3, 320.0, 480.0) == tuple(
        getattr(validation.stability[0], name) for name in ("num_samples", "p10_ms", "p90_ms")
    )


def test_calibrated_and_raw_steps_stand_beside_each_other() -> None:
    report = replace(simulate(), step_time_raw_ms=0.5 * step_ms(TIMES))
    validation = validate_training(measure(), report, SCENARIO)
    assert -0.5 == validation.step_raw.error_ratio
    assert "Without calibration" in _texts(validation)


def test_a_reduction_that_is_hidden_explains_nothing() -> None:
    report = replace(
        simulate(_slower("dp_allreduce", 2.0)),
        communication_ms_by_axis={"dp": 60.0},
        exposed_ms_by_axis={"dp": 0.0},
    )
    validation = validate_training(measure(), report, SCENARIO)
    found = {item.name: item.error_ms for item in validation.contributions}
    assert 0.0 == found["dp_allreduce"]


@given(
    factors=st.fixed_dictionaries({name: st.floats(min_value=0.1, max_value=5.0) for name in TIMES})
)
def test_contributions_and_proportions_are_complete(factors: dict[str, float]) -> None:
    """They add up to the step's error, and to the step, whatever is off."""
    times = {name: time_ms * factors[name] for name, time_ms in TIMES.items()}
    validation = validate_training(measure(), simulate(times), SCENARIO)
    whole = sum(item.error_ms for item in validation.contributions)
    assert whole == pytest.approx(validation.step.error_ms, abs=1e-6)
    shares = sum(item.share_ratio for item in validation.contributions)
    assert shares in (0.0, pytest.approx(1.0))
    measured = validation.proportions["measured"]
    assert sum(measured.values()) == pytest.approx(step_ms(TIMES))


def test_a_part_is_without_what_it_contains() -> None:
    calls = {"encoder_fwd": 4, "encoder_bwd": 4, "mp_allreduce": 8, "optimizer": 1}
    times = {"encoder_fwd": 2.0, "encoder_bwd": 3.0, "mp_allreduce": 0.5, "optimizer": 5.0}
    parts = split_step(40.0, {**times, "dp_allgather": 3.0}, {**calls, "dp_allgather": 1}, 0.25)
    assert {
        "layers, forward": 7.0,
        "layers, backward": 9.0,
        "mp_allreduce": 4.0,
        "dp_allgather": 3.0,
        "optimizer": 2.0,
        WAITING: 15.0,
    } == parts


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1 / 2),
        ({"recompute": "selective"}, 1 / 2),
        ({"recompute": "full"}, 1 / 3),
        ({"recompute": "full", "recompute_layers": 1}, 1 / 3),
        ({"recompute": "full", "recompute_layers": 1, "layout": ParallelLayout(pp=1)}, 0.4),
    ],
)
def test_reductions_are_in_every_pass_that_runs(changes: dict[str, Any], expected: float) -> None:
    scenario = replace(SCENARIO, model=replace(SCENARIO.model, num_layers=2), **changes)
    assert expected == pytest.approx(forward_share(scenario))


def test_several_runs_are_summed_up() -> None:
    reports = (simulate(_slower("optimizer", 1.2)), simulate(_slower("optimizer", 0.6)))
    validations = [validate_training(measure(), report, SCENARIO) for report in reports]
    scores = score_runs([validation.components for validation in validations])
    errors = [pytest.approx(value) for value in (0.2, 0.4, 0.3)]
    assert errors == [item.mape_ratio for item in scores["optimizer"]]
    sections = training_validation_sections(validations)
    assert "Errors of all runs" == sections[0].title
    page = render_page("two runs", sections)
    assert 2 == without_scripts(page).count(">Shares of the first stage&#39;s step<")


def test_a_run_that_would_not_fit_is_compared_and_said_so() -> None:
    unfit = Feasibility(is_feasible=False, reason="stage 0 needs 90 GiB")
    validation = validate_training(measure(), replace(simulate(), feasibility=unfit), SCENARIO)
    assert "could not be: stage 0 needs 90 GiB." in _texts(validation)


def test_a_configuration_that_cannot_run_is_refused() -> None:
    report = TrainingReport(feasibility=Feasibility(is_feasible=False, reason="too large"))
    with pytest.raises(InvalidRequestError, match="too large"):
        validate_training(measure(), report, SCENARIO)
