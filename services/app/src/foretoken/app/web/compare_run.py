"""The requests of a measured run simulated, set against what was measured, and calibrated."""

from collections.abc import Mapping
from typing import Final

from foretoken.app.web.measured_file import CALIBRATE, CORRECTION, read_form, stored_measured
from foretoken.app.web.validations import Validation, ValidationFiles, keep_validation
from foretoken.app.web.visit import Upload, Visit
from foretoken.client.facade import Foretoken
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

EXAMPLE: Final = {"model": "llama-3.1-8b", "device": "h100_sxm", "tp": "1"}
_KEYS: Final[Mapping[str, type[int | str]]] = {
    "device": str,
    "quantization": str,
    "layout.tp": int,
    "engine.max_num_seqs": int,
    "engine.profile": str,
}


def compare_run(visit: Visit, given: Mapping[str, str], upload: Upload) -> Validation:
    """Compare a file with the server of a form, with a calibration if asked for, and keep it.

    Raises:
        ForetokenError: what is wrong with the form, the file or the simulation.

    """
    server = read_form(ServingScenario, "validation", given, _KEYS)
    with stored_measured(upload) as path:
        runs = load_runs(path)
    title = f"{server.model.name} on {server.device}"
    learned = ""
    if CALIBRATE in given:
        sections, report, learned, headline = _calibrate(visit, given, server, runs)
    else:
        simulate = Foretoken(simulator=visit.simulator).simulate_serving
        reports = [simulate(scenario_of_run(server, run)) for run in runs]
        validations = list(map(validate_serving, runs, reports))
        sections, report = sweep_sections(validations), reports[0]
        headline = validations[0].findings[0].text
        if len(runs) > 1:
            headline = f"{len(runs)} loads; {runs[0].name}: {headline}"
    page = render_page(f"{title}: measured and simulated", with_echo(sections, report.echo.lines()))
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
    simulate = Foretoken(simulator=visit.simulator).simulate_serving
    found = calibrate_serving(run, scenario_of_run(server, run), name, simulate, visit.predictor)
    sections = [calibration_section(found), *validation_sections(found.calibrated)]
    others = [one for one in runs if one is not run]
    if others:
        replayed = [simulate(scenario_of_run(found.scenario, one)) for one in others]
        sections += sweep_sections(list(map(validate_serving, others, replayed)))[:1]
    headline = found.calibrated.findings[0].text
    return sections, found.report, write_calibrated(found), headline
