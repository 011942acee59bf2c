"""Steps of dense models that NVIDIA published for H100, B200 and GB200, in BF16 and FP8, compared.

    python tests/benchmarks/bench_training_dense.py [--tables NAME] [--home FOLDER]

The rows are those of `dense_steps.yaml`; none is among the rows of `bench_training_steps.py`.
Operators are those of the starter, as in a new installation, or of the whole import. Nothing is
fitted to the rows. Runs of one model and layout differ in their number of devices alone, so that
each such series has one voice in the means: its own mean. Prints every step, then which goals are
met.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operator_tables import STARTER, WHOLE, open_tables
from training_goals import JudgedStep, write_goals
from training_rows import narrow_weight_rules

from foretoken.app.scenario_file import build_training_scenario
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
            judged = [[_judge(step, services.predictor) for step in run] for run in runs]
        gains = [
            (1 + run[0].error) / (1 + run[1].error) - 1
            for run in judged
            if len(run) == len(_FORMATS)
        ]
        write_goals([step for run in judged for step in run], gains)


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
    if dtype is DType.FP8:
        rules = {**content["trainer"]["rules"], **narrow_weight_rules(content["device"])}
        content["trainer"] = {**content["trainer"], "rules": rules}
    scenario = build_training_scenario(content, {"name": source}, _ROWS)
    if "layers" not in run:
        return scenario
    model = dataclasses.replace(scenario.model, num_layers=run["layers"])
    return dataclasses.replace(scenario, model=model)


def _judge(step: _Step, predictor: PredictorPort) -> JudgedStep:
    scenario = step.scenario
    report = simulate_training(scenario, predictor, None)
    series = f"{step.source}, {scenario.device}"
    judged = JudgedStep.of_report(scenario, report, step.measured_s, series)
    sys.stdout.write(
        f"{series}, {scenario.layout.num_devices}, {scenario.dtype.name.lower()}:"
        f" {step.measured_s:.3f} s, predicted {report.step_time_ms / 1e3:.3f},"
        f" {judged.error:+.1%}{'' if judged.fits else ', predicted not to fit'}\n"
    )
    return judged


if __name__ == "__main__":
    main()
