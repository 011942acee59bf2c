"""What a few measured steps of one machine are worth for its other steps.

Run: python tests/benchmarks/bench_training_calibration.py [DATA_FOLDER] [--home HOME]
     [--num-steps N] [--every N]

The predictor learns operators alone, as for `bench_training_published.py`; HOME keeps it. Of each
source of published steps, N rows in even distances (three, unless said) are what a user would
have measured: `calibrate_training` learns from them. Prints the mean absolute error of the other
rows, raw and calibrated, the error that the calibration itself expects of them, and what it fitted.
No figure here is an error of the simulator without calibration on that machine.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trained_predictor import trained_predictor
from training_rows import PublishedStep, read_steps

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.results.training_report import TrainingReport
from foretoken.simulator.training.calibration import CalibrationResult, calibrate_training
from foretoken.simulator.training.measured_file import MeasuredTime
from foretoken.simulator.training.step import simulate_training

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def main(arguments: Sequence[str]) -> None:
    """Calibrate on a few rows of every source and print the errors of its others."""
    options = _parse(arguments)
    folder = options.data / "training_truth"
    if not folder.is_dir():
        _say(f"skipped: {folder} is not on this machine")
        return
    by_source: defaultdict[str, list[PublishedStep]] = defaultdict(list)
    for step in read_steps(folder):
        by_source[step.source].append(step)
    with trained_predictor(options.data, options.home) as predictor:
        _say(f"{'source':28}{'rows':>5}{'raw':>8}{'calibrated':>12}{'expected':>10}  fitted")
        for source, steps in by_source.items():
            kept = steps[:: options.every]
            if len(kept) > 2 * options.num_steps:
                _print_source(source, kept, options.num_steps, predictor)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("data", nargs="?", type=Path, default=_DATA, help="shared measurements")
    parser.add_argument("--home", type=Path, help="keep the trained predictor here, or use it")
    parser.add_argument("--num-steps", type=int, default=3, help="rows to calibrate on")
    parser.add_argument("--every", type=int, default=5, help="only every Nth row")
    return parser.parse_args(arguments)


def _print_source(
    source: str, steps: Sequence[PublishedStep], num_steps: int, predictor: PredictorPort
) -> None:
    def simulate(scenario: TrainingScenario) -> TrainingReport:
        return simulate_training(scenario, predictor, None)

    distance = len(steps) / num_steps
    places = {int((index + 0.5) * distance) for index in range(num_steps)}
    runs = {f"row {place}": steps[place].scenario for place in sorted(places)}
    measured = [
        MeasuredTime(scenario=f"row {place}", time_ms=steps[place].measured_ms)
        for place in sorted(places)
    ]
    try:
        found = calibrate_training(runs, measured, simulate)
    except InvalidRequestError as err:
        _say(f"{source:28} {err.message}")
        return
    errors: list[tuple[float, float]] = []
    for place, step in enumerate(steps):
        if place not in places:
            report = simulate(replace(step.scenario, calibration=found.calibration))
            if report.step_time_ms:
                times = report.step_time_raw_ms, report.step_time_ms
                raw, calibrated = (abs(time_ms / step.measured_ms - 1) for time_ms in times)
                errors.append((raw, calibrated))
    if not errors:
        return
    means = [statistics.fmean(column) for column in zip(*errors, strict=True)]
    expected = found.left_out_error_ratio
    _say(
        f"{source:28}{len(errors):5}{means[0]:8.1%}{means[1]:12.1%}"
        f"{f'{expected:.1%}' if expected >= 0 else '-':>10}  {_fitted(found)}"
    )


def _fitted(found: CalibrationResult) -> str:
    calibration = found.calibration
    values = {
        "factor": f"x{calibration.step_factor:.3f}",
        "gap": f"gaps {calibration.forward_gap_us:.0f} + {calibration.backward_gap_us:.0f} us",
        "step_gap": f"step {calibration.step_gap_us / 1e3:.1f} ms",
    }
    return ", ".join(values[name] for name in found.parameters) or "nothing"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
