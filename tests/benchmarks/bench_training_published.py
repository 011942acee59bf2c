"""Error of whole training steps that others measured and published.

Run: python tests/benchmarks/bench_training_published.py [DATA_FOLDER] [--rows] [--source TEXT]
     [--home FOLDER] [--every N]

The predictor learns operators alone, those of `training_tables.py`; what frameworks run is in their
profiles, what machines are in their files. Nothing is fitted to the steps. Prints, by source, the
mean signed, mean absolute and median error of the step, the share of steps inside the simulated
interval, the error of the peak memory, and what the time of the busiest stage rests on: measured on
the device itself (or between its measurements), carried over from other devices, or the roofline;
next to them the goal and the errors of other simulators. `--rows` prints every configuration.
"""

import argparse
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trained_predictor import trained_predictor
from training_rows import PublishedStep, read_steps

from foretoken.domain.errors import ForetokenError
from foretoken.domain.ports import PredictorPort
from foretoken.domain.results.training_report import TrainingReport
from foretoken.domain.units import GIB
from foretoken.simulator.training.step import simulate_training

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

# Goal, and what others reach on the same rows, of the mean absolute error.
# Source: calculon's and SimuMax's own validation, and their runs on these tables; vTrain's paper.
_GOALS = {
    "2205.05198 table 5": ("5 %", "calculon 3.65 % (own calibration), SimuMax 6.7 %"),
    "2104.04473 table 1": ("10 %", "calculon 10-11 %"),
    "2104.04473 table 2": ("10 %", "calculon 10-11 %"),
    "2104.04473 table 2, ZeRO-3": ("10 %", ""),
    "Megatron-LM v2.0": ("10 %", "calculon 10-11 %"),
    "2201.11990 MT-NLG": ("10 %", "calculon 10-11 %"),
    "Megatron tables together": ("10 %", "calculon 10-11 %"),
    "vTrain, 39.1B": ("12 %", "calculon 19.7 %, vTrain 14.7 %"),
    "vTrain, one node": ("12 %", "calculon 39 %, vTrain 8.4 %"),
    "SimuMax B200": ("6 %", "SimuMax 5.6 % (own set)"),
    "InternLM 7B": ("10 %", ""),
}
# Sources that the goal takes together.
_MEGATRON = (
    "2104.04473 table 1",
    "2104.04473 table 2",
    "Megatron-LM v2.0",
    "2201.11990 MT-NLG",
)
# What an estimate rests on, in three kinds.
_KINDS = {
    "measured": "own",
    "interpolated": "own",
    "extrapolated": "own",
    "transferred": "cross",
    "analytical": "roofline",
}


@dataclass(frozen=True, slots=True)
class _Result:
    step: PublishedStep
    report: TrainingReport

    @property
    def error(self) -> float:
        return self.report.step_time_ms / self.step.measured_ms - 1

    @property
    def is_inside(self) -> bool:
        low, high = self.report.step_time_low_ms, self.report.step_time_high_ms
        return low <= self.step.measured_ms <= high

    @property
    def memory_error(self) -> float | None:
        if not self.step.peak_gib:
            return None
        peak_bytes = max(stage.total_bytes for stage in self.report.memory)
        return peak_bytes / GIB / self.step.peak_gib - 1

    def share(self, kind: str) -> float:
        """Return the part of the busiest stage's time that rests on a kind of estimate."""
        ratios = self.report.step_time_ratio_by_provenance.items()
        return sum(ratio for name, ratio in ratios if _KINDS.get(name) == kind)


def main(arguments: Sequence[str]) -> None:
    """Learn the tables, simulate every row and print the errors by source."""
    options = _parse(arguments)
    path = options.data / "training_truth"
    if not path.is_dir():
        _say(f"skipped: {path} is not on this machine")
        return
    steps = [step for step in read_steps(path) if options.source in step.source]
    with trained_predictor(options.data, options.home) as predictor:
        results, failures = _simulate(steps[:: options.every], predictor, has_rows=options.rows)
    _print_table(results)
    together = [result for source in _MEGATRON for result in results.get(source, ())]
    if together:
        _print_line("Megatron tables together", together)
    for (source, reason), count in failures.items():
        _say(f"not simulated: {count} of {source}: {reason}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("data", nargs="?", type=Path, default=_DATA, help="shared measurements")
    parser.add_argument("--rows", action="store_true", help="print every configuration")
    parser.add_argument("--source", default="", help="only sources with this in their name")
    parser.add_argument("--home", type=Path, help="keep the trained predictor here, or use it")
    parser.add_argument("--every", type=int, default=1, help="only every Nth row")
    return parser.parse_args(arguments)


def _simulate(
    steps: Sequence[PublishedStep], predictor: PredictorPort, *, has_rows: bool
) -> tuple[dict[str, list[_Result]], Counter[tuple[str, str]]]:
    results: dict[str, list[_Result]] = defaultdict(list)
    failures: Counter[tuple[str, str]] = Counter()
    started_s = time.perf_counter()
    for step in steps:
        try:
            report = simulate_training(step.scenario, predictor, None)
        except ForetokenError as err:
            failures[step.source, err.message] += 1
            continue
        if not report.step_time_ms:
            failures[step.source, report.feasibility.reason] += 1
            continue
        result = _Result(step, report)
        results[step.source].append(result)
        if has_rows:
            _print_row(result)
    _say(f"simulated {len(steps)} steps in {time.perf_counter() - started_s:.0f} s")
    return results, failures


def _print_row(result: _Result) -> None:
    step, report = result.step, result.report
    memory = "" if result.memory_error is None else f" memory {result.memory_error:+.1%}"
    groups = sorted(report.step_time_ms_by_group.items(), key=lambda item: -item[1])
    parts = " ".join(
        f"{name} {share_ms / report.step_time_ms:.0%}" for name, share_ms in groups[:7]
    )
    _say(
        f"{step.source:27} {step.label:62} measured {step.measured_ms:9.1f} simulated "
        f"{report.step_time_ms:9.1f} ms {result.error:+7.1%}{memory} | {parts}"
    )


def _print_table(results: dict[str, list[_Result]]) -> None:
    _say(
        f"{'source':27} {'n':>4} {'signed':>7} {'mean abs':>8} {'median':>7} {'inside':>6} "
        f"{'memory':>6} {'own':>5} {'cross':>5} {'roof':>5}  goal   others"
    )
    for source, found in results.items():
        _print_line(source, found)


def _print_line(source: str, found: Sequence[_Result]) -> None:
    errors = [result.error for result in found]
    memory = [abs(r.memory_error) for r in found if r.memory_error is not None]
    own, cross, roofline = (statistics.fmean(r.share(kind) for r in found) for kind in _SHARES)
    goal, others = _GOALS.get(source, ("", ""))
    _say(
        f"{source:27} {len(found):4} {statistics.fmean(errors):+7.1%} "
        f"{statistics.fmean(abs(error) for error in errors):8.1%} "
        f"{statistics.median(errors):+7.1%} "
        f"{statistics.fmean(result.is_inside for result in found):6.0%} "
        f"{f'{statistics.fmean(memory):.1%}' if memory else '-':>6} "
        f"{own:5.0%} {cross:5.0%} {roofline:5.0%}  {goal:5}  {others}"
    )


_SHARES = ("own", "cross", "roofline")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
