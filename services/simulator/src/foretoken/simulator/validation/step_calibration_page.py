"""What was learned of an engine's steps: measured, as estimated and as corrected."""

from foretoken.domain.units import US_PER_MS
from foretoken.page.block import Table
from foretoken.page.section import Section
from foretoken.simulator.validation.step_calibration import StepCalibration


def step_calibration_section(calibration: StepCalibration) -> Section:
    """Return how far each kind of step was off and is, and how to use what was learned."""
    steps = calibration.steps
    rows = [
        (
            *(each.kind, each.num_steps, each.measured_us / US_PER_MS, each.raw_us / US_PER_MS),
            f"{each.raw_error_ratio:.1%}",
            each.corrected_us / US_PER_MS,
            f"{each.corrected_error_ratio:.1%}",
            f"{each.left_out_error_ratio:.1%}",
            f"x{each.ratio:.3g} + {each.constant_us / US_PER_MS:.3g} ms",
            f"{each.low_ratio - 1:+.1%} to {each.high_ratio - 1:+.1%}",
        )
        for each in steps.kinds
    ]
    headers = (
        *("steps", "number", "measured (ms)", "raw (ms)", "error", "calibrated (ms)"),
        *("error then", "error, left out", "learned", "nine in ten"),
    )
    scope = ", ".join(
        part
        for part in (
            steps.model,
            steps.engine,
            f"{calibration.correction.device} {steps.topology}".strip(),
            steps.layout or "one device",
        )
        if part
    )
    notes = "".join(f" {note[0].upper()}{note[1:]}." for note in calibration.notes)
    return Section(
        title="Steps",
        intro=f"Learned from {steps.source}, of {scope}, and of nothing else. Errors are means"
        " without their sign; go by those of steps that were left out."
        f"{notes} Below is what a scenario of the same server has.",
        table=Table.listed(headers, rows),
        listing=f"correction: {calibration.correction.name}\n",
    )
