"""Validate: the requests of a measured run simulated, set against what was measured, calibrated."""

from collections.abc import Mapping
from typing import Any, Final

from foretoken.app.web.question import find_problems, model_text, stored
from foretoken.app.web.validations import (
    Validation,
    ValidationFiles,
    keep_validation,
    list_validations,
)
from foretoken.app.web.views.ask import known_names
from foretoken.app.web.visit import Redirect, Shown, Upload, Visit
from foretoken.client.job_wait import wait_for_job
from foretoken.domain import schema
from foretoken.domain.errors import ForetokenError, InvalidRequestError
from foretoken.domain.job import JobState, error_of_job
from foretoken.domain.models.load import load_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.serving_run import ServingRun
from foretoken.domain.results.report import ServingReport
from foretoken.page.section import Section
from foretoken.simulator.report.page import render_page
from foretoken.simulator.report.question import with_echo
from foretoken.simulator.validation.measured_run import load_runs, scenario_of_run
from foretoken.simulator.validation.serving import validate_serving
from foretoken.simulator.validation.serving_calibration import calibrate_serving
from foretoken.simulator.validation.serving_page import (
    calibration_section,
    sweep_sections,
    validation_sections,
    write_calibrated,
)

_MEASURED: Final = "measured"
# What requests a calibration, and the field with the name it is kept under.
CALIBRATE, CORRECTION = "calibrate", "correction"
_EXAMPLE: Final = {"model": "llama-3.1-8b", "device": "h100_sxm", "tp": "1"}


def show(visit: Visit) -> Shown:
    """Show the form, and what was compared before."""
    return _show(visit, visit.asked or _EXAMPLE, {})


def compare(visit: Visit) -> Shown | Redirect:
    """Simulate the measured requests, wait for that, and go to the page of the comparison."""
    try:
        upload = visit.uploads.get(_MEASURED)
        if upload is None or not upload.content:
            raise InvalidRequestError.of_field(_MEASURED, "choose the file of a measured run")
        return Redirect(f"/validate/{compare_run(visit, visit.posted, upload).name}")
    except ForetokenError as err:
        return _show(visit, visit.posted, find_problems(err), status=400)


def compare_run(visit: Visit, given: Mapping[str, str], upload: Upload) -> Validation:
    """Compare a file with the server of a form, with a calibration if asked for, and keep it.

    Raises:
        ForetokenError: what is wrong with the form, the file or the simulation.

    """
    server = _read_scenario(given)
    runs = _read_runs(upload)
    title = f"{server.model.name} on {server.device}"
    learned = ""
    if CALIBRATE in given:
        sections, report, learned, headline = _calibrate(visit, given, server, runs)
    else:
        reports = [_simulate(visit, scenario_of_run(server, run)) for run in runs]
        validations = list(map(validate_serving, runs, reports))
        sections, report = sweep_sections(validations), reports[0]
        headline = validations[0].findings[0].text
        if len(runs) > 1:
            headline = f"{len(runs)} loads; {runs[0].name}: {headline}"
    page = render_page(f"{title}: measured and simulated", with_echo(sections, report.echo))
    found = Validation(
        kind="serving", title=title, headline=headline, file_name=upload.name, learned=learned
    )
    return keep_validation(visit, found, ValidationFiles(page=page, form=given, measured=upload))


def _calibrate(
    visit: Visit, given: Mapping[str, str], server: ServingScenario, runs: tuple[ServingRun, ...]
) -> tuple[list[Section], ServingReport, str, str]:
    """Return the page's sections, its report, the keys that were learned, and what to say first.

    Of several loads the one with most requests is learned from, and the others tell what the
    calibration is worth.
    """
    run = max(runs, key=lambda one: len(one.completed))
    name = given.get(CORRECTION, "").strip() or f"{server.device}-calibrated"
    found = calibrate_serving(
        run,
        scenario_of_run(server, run),
        name,
        lambda changed: _simulate(visit, changed),
        visit.predictor,
    )
    sections = [calibration_section(found), *validation_sections(found.calibrated)]
    others = [one for one in runs if one is not run]
    if others:
        replayed = [_simulate(visit, scenario_of_run(found.scenario, one)) for one in others]
        sections += sweep_sections(list(map(validate_serving, others, replayed)))[:1]
    headline = found.calibrated.findings[0].text
    return sections, found.report, write_calibrated(found), headline


def _simulate(visit: Visit, scenario: ServingScenario) -> ServingReport:
    job = wait_for_job(visit.simulator, visit.simulator.create_serving_simulation(scenario))
    if job.state is not JobState.SUCCEEDED:
        raise error_of_job(job)
    return visit.simulator.get_serving_report(job.job_id)


def _read_runs(upload: Upload) -> tuple[ServingRun, ...]:
    """Return the runs of a file, whose format its content tells.

    Raises:
        InvalidRequestError: it is in no format known here.

    """
    with stored(upload) as path:
        try:
            return load_runs(path)
        except InvalidRequestError as err:
            # It names the file where it lay for the moment.
            said = err.message.removeprefix(f"--{_MEASURED}: ").replace(str(path), upload.name)
            raise InvalidRequestError.of_field(_MEASURED, said) from err


def _read_scenario(given: Mapping[str, str]) -> ServingScenario:
    content: dict[str, Any] = {"name": "validation", "model": model_text(given)}
    for field in ("device", "quantization"):
        if text := given.get(field, "").strip():
            content[field] = text
    for path, kind in (("layout.tp", int), ("engine.max_num_seqs", int), ("engine.profile", str)):
        text = given.get(path.rpartition(".")[2], "").strip()
        if text and kind is int and not text.isdecimal():
            raise InvalidRequestError.of_field(path, f"{text!r} is not a whole number")
        if text:
            schema.set_key(content, path, kind(text))
    return schema.decode(ServingScenario, {**content, "model": load_model(content["model"])})


def _show(
    visit: Visit, given: Mapping[str, str], problems: dict[str, str], status: int = 200
) -> Shown:
    content = {**known_names(), "given": given, "problems": problems}
    content["kept"] = list_validations(visit)
    return Shown(template="validate.html", content=content, status=status)
