"""Steps of dense models that NVIDIA published for H100, B200 and GB200, in BF16 and FP8, compared.

    python tests/benchmarks/bench_training_dense.py [--tables NAME] [--home FOLDER]

The rows are those of `dense_steps.yaml`; none is among the rows of `bench_training_steps.py`.
Operators are those of the starter, as in a new installation, or of the whole import. Nothing is
fitted to the rows. Runs of one model and layout differ in their number of devices alone, so that
each such series has one voice in the means: its own mean. Prints every step, then the errors by
format and device, and the gain of FP8 over BF16.
"""

import argparse
import dataclasses
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operator_tables import STARTER, WHOLE, open_tables

from foretoken.app.scenario_file import build_training_scenario
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.plugins import read_yaml
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.training.step import simulate_training

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_ROWS = Path(__file__).with_name("dense_steps.yaml")
_FORMATS = (DType.BF16, DType.FP8)


@dataclass(frozen=True, slots=True)
class _Step:
    source: str
    scenario: TrainingScenario
    measured_s: float


@dataclass(frozen=True, slots=True)
class _Answer:
    step: _Step
    predicted_s: float
    is_inside: bool
    width: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.step.measured_s - 1

    @property
    def kind(self) -> str:
        scenario = self.step.scenario
        architecture = find_device(scenario.device).architecture
        return f"dense, {scenario.dtype.name.lower()}, {architecture}"


def main() -> None:
    """Print the error of every step, and of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", default="", help="folder of the whole import")
    parser.add_argument("--tables", action="append", choices=(WHOLE, STARTER), help="only these")
    options = parser.parse_args()
    runs = list(_read_runs())
    for name in options.tables or (WHOLE, STARTER):
        sys.stdout.write(f"== {name}\n")
        with open_tables(name, _DATA, options.home) as services:
            answers = [[_answer(step, services.predictor) for step in run] for run in runs]
        _write_errors([answer for run in answers for answer in run])
        _write_gains([run for run in answers if len(run) == len(_FORMATS)])


def _read_runs() -> Iterator[list[_Step]]:
    """Yield the steps of every run, one for each format it has."""
    for source, group in read_yaml(_ROWS, "published steps").items():
        for run in group["runs"]:
            yield [
                _Step(source, _build(group["scenario"], run, dtype, source), measured_s)
                for dtype in _FORMATS
                if (measured_s := _seconds(group["scenario"], run, dtype.name.lower()))
            ]


def _seconds(scenario: Mapping[str, Any], run: Mapping[str, Any], dtype: str) -> float:
    """Return what a run's step took in a format, 0 where it was not run."""
    if rate := run.get(f"{dtype}_tokens_per_s"):
        return float(run["batch"] * scenario["sequence_length"] / run["devices"] / rate)
    return float(run.get(f"{dtype}_s", 0))


def _build(
    like: Mapping[str, Any], run: Mapping[str, Any], dtype: DType, source: str
) -> TrainingScenario:
    layout = dict(like["layout"])
    layout |= {"pp": run["pp"]} if "pp" in run else {}
    split = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)
    content = {
        **like,
        "device": run.get("device", like["device"]),
        "dtype": dtype.name.lower(),
        "global_batch_size": run["batch"],
        "layout": {**layout, "dp": run["devices"] // split},
    }
    rules = dict(content["trainer"]["rules"])
    if dtype is DType.FP8:
        # NVIDIA/NeMo and Megatron-Bridge, as in bench_training_steps.py.
        rules["keeps_narrow_weights"] = "true"
    content["trainer"] = {**content["trainer"], "rules": rules}
    scenario = build_training_scenario(content, {"name": source}, _ROWS)
    if "layers" not in run:
        return scenario
    model = dataclasses.replace(scenario.model, num_layers=run["layers"])
    return dataclasses.replace(scenario, model=model)


def _answer(step: _Step, predictor: PredictorPort) -> _Answer:
    report = simulate_training(step.scenario, predictor, None)
    low_s, high_s = report.step_time_low_ms / 1e3, report.step_time_high_ms / 1e3
    step_s = report.step_time_ms / 1e3
    answer = _Answer(step, step_s, low_s <= step.measured_s <= high_s, (high_s - low_s) / step_s)
    scenario = step.scenario
    fits = "" if report.feasibility.is_feasible else ", predicted not to fit"
    sys.stdout.write(
        f"{step.source}, {scenario.layout.num_devices} {scenario.device},"
        f" {scenario.dtype.name.lower()}: {step.measured_s:.3f} s, predicted {step_s:.3f},"
        f" {answer.error:+.1%}{fits}\n"
    )
    return answer


def _write_errors(answers: Sequence[_Answer]) -> None:
    """Print the errors of every kind, each series with the voice of its mean."""
    kinds: dict[str, dict[str, list[_Answer]]] = defaultdict(lambda: defaultdict(list))
    for answer in answers:
        series = f"{answer.step.source}, {answer.step.scenario.device}"
        for kind in (answer.kind, "all"):
            kinds[kind][f"{series}, {answer.kind}"].append(answer)
    for kind, groups in kinds.items():
        absolute, signed = (
            statistics.fmean(statistics.fmean(map(of, own)) for own in groups.values())
            for of in (lambda one: abs(one.error), lambda one: one.error)
        )
        every = [answer for own in groups.values() for answer in own]
        inside = sum(answer.is_inside for answer in every)
        width = statistics.median(answer.width for answer in every)
        sys.stdout.write(
            f"{kind}: {len(every)} steps of {len(groups)} series, mean absolute error"
            f" {absolute:.1%}, signed {signed:+.1%}; {inside} inside, median width {width:.2f}\n"
        )


def _write_gains(pairs: Sequence[Sequence[_Answer]]) -> None:
    """Print how much faster FP8 is than BF16, measured and predicted."""
    gains = [
        (wide.step.measured_s / narrow.step.measured_s, wide.predicted_s / narrow.predicted_s)
        for wide, narrow in pairs
    ]
    measured, predicted = (statistics.median(gain[i] for gain in gains) for i in (0, 1))
    error = statistics.fmean(abs(gain[1] / gain[0] - 1) for gain in gains)
    sys.stdout.write(
        f"gain of FP8, {len(gains)} pairs: median {measured:.2f}, predicted {predicted:.2f};"
        f" mean absolute error {error:.1%}\n"
    )


if __name__ == "__main__":
    main()
