"""Validate: steps of a training run simulated, set against measured ones, and calibrated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from foretoken.app.cli.calibrate import describe_calibration, read_times, write_calibration
from foretoken.app.web.question import find_problems, model_text, stored
from foretoken.app.web.validations import Validation, ValidationFiles, keep_validation
from foretoken.app.web.views.ask import known_names
from foretoken.app.web.views.validate import CALIBRATE
from foretoken.app.web.visit import Redirect, Shown, Upload, Visit
from foretoken.client.job_wait import wait_for_job
from foretoken.domain import schema
from foretoken.domain.errors import ForetokenError, InvalidRequestError
from foretoken.domain.job import JobState, error_of_job
from foretoken.domain.models.load import load_model
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import TrainingReport
from foretoken.page.block import Table
from foretoken.page.section import Section
from foretoken.simulator.report.page import render_page
from foretoken.simulator.report.question import with_echo
from foretoken.simulator.training.calibration import CalibrationResult, calibrate_training
from foretoken.simulator.validation.training import validate_training
from foretoken.simulator.validation.training_page import training_validation_sections
from foretoken.simulator.validation.training_run import read_run

_MEASURED: Final = "measured"
_NAME: Final = "measured-run"
_WHOLE: Final = {
    "tp": "layout.tp",
    "pp": "layout.pp",
    "dp": "layout.dp",
    "cp": "layout.cp",
    "ep": "layout.ep",
    "sequence_length": "sequence_length",
    "micro_batch_size": "micro_batch_size",
    "global_batch_size": "global_batch_size",
    "zero_stage": "zero_stage",
}
_WORDS: Final = {
    "device": "device",
    "trainer": "trainer.profile",
    "recompute": "recompute",
    "pipeline_schedule": "pipeline_schedule",
}
_EXAMPLE: Final = {
    "model": "llama-2-7b",
    "device": "a100_sxm_80",
    "tp": "2",
    "pp": "2",
    "dp": "2",
    "sequence_length": "4096",
    "micro_batch_size": "1",
    "global_batch_size": "32",
    "pipeline_schedule": "one_f_one_b",
    "recompute": "full",
    "zero_stage": "1",
}


def show(visit: Visit) -> Shown:
    """Show the form."""
    return _show(visit.asked or _EXAMPLE, {})


def compare(visit: Visit) -> Shown | Redirect:
    """Simulate a step, and go to the page that compares it, with a calibration if asked for."""
    try:
        upload = visit.uploads.get(_MEASURED)
        if upload is None or not upload.content:
            raise InvalidRequestError.of_field(_MEASURED, "choose the file of measured steps")
        return Redirect(f"/validate/{compare_steps(visit, visit.posted, upload).name}")
    except ForetokenError as err:
        return _show(visit.posted, find_problems(err), status=400)


def compare_steps(visit: Visit, given: Mapping[str, str], upload: Upload) -> Validation:
    """Compare a file of steps with the run of a form, with a calibration if asked for; keep it.

    Raises:
        ForetokenError: what is wrong with the form, the file or the simulation.

    """
    scenario = _read_scenario(given)
    learned = ""
    with stored(upload) as path:
        try:
            run = read_run(path, "")
            report = _simulate(visit, scenario)
            validation = validate_training(run, report, scenario)
            sections = list(training_validation_sections([validation]))
            if CALIBRATE in given:
                section = _calibrate(visit, scenario, path)
                learned = section.listing
                sections.insert(1, section)
        except InvalidRequestError as err:
            # It names the file where it lay for the moment.
            said = err.message.replace(str(path), upload.name)
            raise InvalidRequestError.of_field(_MEASURED, said) from err
    title = f"{scenario.model.name} on {scenario.layout.num_devices} {scenario.device}"
    page = render_page(f"{title}: measured and simulated", with_echo(sections, report.echo))
    found = Validation(
        kind="training",
        title=title,
        headline=validation.findings[0].text,
        file_name=upload.name,
        learned=learned,
    )
    return keep_validation(visit, found, ValidationFiles(page=page, form=given, measured=upload))


def _calibrate(visit: Visit, scenario: TrainingScenario, path: Path) -> Section:
    """Return what the measured times tell of the hosts, as a file that scenarios name."""
    result = calibrate_training(
        {scenario.name: scenario},
        read_times(path, [scenario.name]),
        lambda changed: _simulate(visit, changed),
        (),
        path.name,
    )
    return Section(
        title="Calibrated",
        intro="What is below is the file that a scenario of the same cluster and software names as"
        " `calibration`. " + " ".join(describe_calibration(result)),
        table=_steps_table(result),
        listing=write_calibration(result),
    )


def _steps_table(result: CalibrationResult) -> Table | None:
    if not result.steps:
        return None
    rows = [
        (
            step.name,
            f"{step.measured_ms:,.1f}",
            f"{step.raw_ms:,.1f}",
            f"{step.raw_ms / step.measured_ms - 1:+.1%}",
            f"{step.calibrated_ms:,.1f}",
            f"{step.calibrated_ms / step.measured_ms - 1:+.1%}",
        )
        for step in result.steps
    ]
    headers = ("step", "measured (ms)", "raw (ms)", "error", "calibrated (ms)", "error then")
    return Table.listed(headers=headers, rows=rows)


def _simulate(visit: Visit, scenario: TrainingScenario) -> TrainingReport:
    job = wait_for_job(visit.simulator, visit.simulator.create_training_simulation(scenario))
    if job.state is not JobState.SUCCEEDED:
        raise error_of_job(job)
    return visit.simulator.get_training_report(job.job_id)


def _read_scenario(given: Mapping[str, str]) -> TrainingScenario:
    content: dict[str, Any] = {"name": _NAME}
    for name, path in (_WHOLE | _WORDS).items():
        text = given.get(name, "").strip()
        if text and name in _WHOLE and not text.isdecimal():
            raise InvalidRequestError.of_field(name, f"{text!r} is not a whole number")
        if text:
            schema.set_key(content, path, int(text) if name in _WHOLE else text)
    model = load_model(model_text(given))
    return schema.decode(TrainingScenario, {**content, "model": model})


def _show(given: Mapping[str, str], problems: dict[str, str], status: int = 200) -> Shown:
    content = {**known_names(), "given": given, "problems": problems}
    return Shown(template="validate_training.html", content=content, status=status)
