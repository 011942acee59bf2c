"""Steps of a training run simulated, set against measured ones, and calibrated."""

from collections.abc import Mapping
from typing import Final

from foretoken.app.cli.calibrate import describe_calibration, read_times, write_calibration
from foretoken.app.web.measured_file import CALIBRATE, read_form, stored_measured
from foretoken.app.web.validations import Validation, ValidationFiles, keep_validation
from foretoken.app.web.visit import Upload, Visit
from foretoken.client.facade import Foretoken
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.page.block import Table
from foretoken.page.section import Section
from foretoken.simulator.report.page import render_page
from foretoken.simulator.report.question import with_echo
from foretoken.simulator.training.calibration import CalibrationResult, calibrate_training
from foretoken.simulator.validation.training import validate_training
from foretoken.simulator.validation.training_page import training_validation_sections
from foretoken.simulator.validation.training_run import read_run

_KEYS: Final[Mapping[str, type[int | str]]] = {
    **{f"layout.{axis}": int for axis in ("tp", "pp", "dp", "cp", "ep")},
    "sequence_length": int,
    "micro_batch_size": int,
    "global_batch_size": int,
    "zero_stage": int,
    "device": str,
    "trainer.profile": str,
    "recompute": str,
    "pipeline_schedule": str,
}
EXAMPLE: Final = {
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


def compare_steps(visit: Visit, given: Mapping[str, str], upload: Upload) -> Validation:
    """Compare a file of steps with the run of a form, with a calibration if asked for; keep it.

    Raises:
        ForetokenError: what is wrong with the form, the file or the simulation.

    """
    scenario = read_form(TrainingScenario, "measured-run", given, _KEYS)
    simulate = Foretoken(simulator=visit.simulator).simulate_training
    learned = ""
    with stored_measured(upload) as path:
        run = read_run(path, "")
        report = simulate(scenario)
        validation = validate_training(run, report, scenario)
        sections = list(training_validation_sections([validation]))
        if CALIBRATE in given:
            times = read_times(path, [scenario.name])
            section = _calibrated(
                calibrate_training({scenario.name: scenario}, times, simulate, (), path.name)
            )
            learned = section.listing
            sections.insert(1, section)
    title = f"{scenario.model.name} on {scenario.layout.num_devices} {scenario.device}"
    page = render_page(f"{title}: measured and simulated", with_echo(sections, report.echo.lines()))
    found = Validation(
        kind="training",
        title=title,
        headline=validation.findings[0].text,
        file_name=upload.name,
        learned=learned,
    )
    return keep_validation(visit, found, ValidationFiles(page=page, form=given, measured=upload))


def _calibrated(result: CalibrationResult) -> Section:
    """Return what the measured times tell of the hosts, as a file that scenarios name."""
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
