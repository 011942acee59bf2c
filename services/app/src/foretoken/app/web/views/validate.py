"""Validate: the requests of a measured run simulated, and set against what was measured."""

from typing import Any, Final

from foretoken.app.web.question import find_problems, model_text, stored
from foretoken.app.web.views.ask import known_names
from foretoken.app.web.views.results import send_page
from foretoken.app.web.visit import Sent, Shown, Upload, Visit
from foretoken.client.job_wait import wait_for_job
from foretoken.domain import schema
from foretoken.domain.errors import ForetokenError, InvalidRequestError
from foretoken.domain.job import JobState, error_of_job
from foretoken.domain.models.load import load_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.serving_run import ServingRun
from foretoken.simulator.report.echo_section import with_echo
from foretoken.simulator.report.page import render_page
from foretoken.simulator.validation.measured_run import load_run, scenario_of_run
from foretoken.simulator.validation.serving import validate_serving
from foretoken.simulator.validation.serving_page import validation_sections

_MEASURED: Final = "measured"
_EXAMPLE: Final = {"model": "llama-3.1-8b", "device": "h100_sxm", "tp": "1"}


def show(visit: Visit) -> Shown:
    """Show the form."""
    return _show(visit.asked or _EXAMPLE, {})


def compare(visit: Visit) -> Shown | Sent:
    """Simulate the measured requests, wait for that, and send the page of the comparison."""
    try:
        server = _read_scenario(visit.posted)
        run = _read_run(visit.uploads.get(_MEASURED))
        scenario = scenario_of_run(server, run)
    except ForetokenError as err:
        return _show(visit.posted, find_problems(err), status=400)
    job = wait_for_job(visit.simulator, visit.simulator.create_serving_simulation(scenario))
    if job.state is not JobState.SUCCEEDED:
        raise error_of_job(job)
    report = visit.simulator.get_serving_report(job.job_id)
    sections = validation_sections(validate_serving(run, report))
    title = f"{scenario.model.name} on {scenario.device}: measured and simulated"
    return send_page(render_page(title, with_echo(sections, report.echo)))


def _read_run(upload: Upload | None) -> ServingRun:
    """Return the run of a file, whose format its content tells.

    Raises:
        InvalidRequestError: there is none, or it is in no format known here.

    """
    if upload is None or not upload.content:
        raise InvalidRequestError.of_field(_MEASURED, "choose the file of a measured run")
    with stored(upload) as path:
        try:
            return load_run(path)
        except InvalidRequestError as err:
            # It names the file where it lay for the moment.
            said = err.message.removeprefix(f"--{_MEASURED}: ").replace(str(path), upload.name)
            raise InvalidRequestError.of_field(_MEASURED, said) from err


def _read_scenario(given: dict[str, str]) -> ServingScenario:
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


def _show(given: dict[str, str], problems: dict[str, str], status: int = 200) -> Shown:
    content = {**known_names(), "given": given, "problems": problems}
    return Shown(template="validate.html", content=content, status=status)
