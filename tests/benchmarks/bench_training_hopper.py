"""Training throughput on H100, H800 and B200 compared with published figures.

Run: python tests/benchmarks/bench_training_hopper.py [--home FOLDER] [--tables NAME]

The operators are those of the whole import, of FOLDER or made anew, then the starter's, as in a new
installation. `hopper_steps.yaml` has every published run as a scenario, with its source; nothing in
it or in the models is fitted to these figures. Prints, row by row and by source, tokens a second
and GPU, the error, and whether the scenario is predicted to fit: what was run did. Models with
experts are summed up apart.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operator_tables import STARTER, WHOLE, open_tables

from foretoken.app.scenario_file import build_training_scenario
from foretoken.domain.plugins import read_yaml
from foretoken.domain.ports import PredictorPort
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.training.step import simulate_training

_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
_ROWS = Path(__file__).with_name("hopper_steps.yaml")


@dataclass(frozen=True, slots=True)
class _Published:
    source: str
    measured: float
    scenario: TrainingScenario

    @property
    def label(self) -> str:
        scenario = self.scenario
        degrees = scenario.layout
        words = (f"{name}{getattr(degrees, name)}" for name in ("tp", "pp", "cp", "ep", "dp"))
        return f"{scenario.model.name}, {degrees.num_devices} {scenario.device}: {' '.join(words)}"


def main() -> None:
    """Print the error of every row, and of each kind of model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", default="", help="folder of the whole import")
    parser.add_argument("--tables", action="append", choices=(WHOLE, STARTER), help="only these")
    options = parser.parse_args()
    for name in options.tables or (WHOLE, STARTER):
        sys.stdout.write(f"== {name}\n")
        with open_tables(name, _DATA, options.home) as services:
            _compare(services.predictor)


def _compare(predictor: PredictorPort) -> None:
    errors: dict[str, list[float]] = defaultdict(list)
    for row in _read_rows():
        error = _tell(row, predictor)
        errors[row.source].append(error)
        has_experts = row.scenario.model.moe is not None
        errors["with experts" if has_experts else "dense"].append(error)
    for name, found in errors.items():
        absolute = statistics.mean(map(abs, found))
        sys.stdout.write(
            f"{name}: {len(found)} runs, mean absolute error {absolute:.1%},"
            f" signed {statistics.mean(found):+.1%}\n"
        )


def _read_rows() -> Iterator[_Published]:
    for source, group in read_yaml(_ROWS, "published runs").items():
        for row in group["rows"]:
            content: dict[str, Any] = {**group["scenario"], **row["scenario"]}
            yield _Published(source, row["tokens_per_s_per_gpu"], _build(content, source))


def _build(content: Mapping[str, Any], source: str) -> TrainingScenario:
    return build_training_scenario(dict(content), {"name": source}, _ROWS)


def _tell(row: _Published, predictor: PredictorPort) -> float:
    report = simulate_training(row.scenario, predictor, None)
    error = report.tokens_per_s_per_gpu / row.measured - 1
    fits = "" if report.feasibility.is_feasible else ", predicted not to fit"
    sys.stdout.write(
        f"{row.source}, {row.label}: {report.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, published"
        f" {row.measured:,.0f}, {error:+.1%}{fits}\n"
    )
    return error


if __name__ == "__main__":
    main()
