"""`foretoken search`: rank every layout of a deployment or a training run."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from foretoken.app.cli.simulate import scenario_changes
from foretoken.app.cli.state import build_table, note, open_composition, show_progress, state_of
from foretoken.app.scenario_file import read_serving_scenario, read_training_scenario
from foretoken.domain.scenario import ServingScenario, TrainingScenario
from foretoken.domain.units import GIB
from foretoken.simulator.search.space import serving_space, training_space

app = typer.Typer(help="Rank every layout of a deployment or a training run.", no_args_is_help=True)

_SET_HELP = "Change one key of the scenario: `engine.max_num_seqs=64`. Repeatable."


S = TypeVar("S", ServingScenario, TrainingScenario)
R = TypeVar("R")


@app.command()
def serving(
    context: typer.Context,
    scenario: Annotated[Path, typer.Argument(help="Scenario file (YAML); its layout is ignored.")],
    devices: Annotated[int, typer.Option(help="Devices to spread the deployment over.")] = 1,
    change: Annotated[list[str] | None, typer.Option("--set", help=_SET_HELP)] = None,
) -> None:
    """Simulate every tp x pp x dp of the devices; rank by goodput, then by throughput."""
    state = state_of(context)
    with open_composition(state) as services:
        resolved = read_serving_scenario(scenario, scenario_changes(change))
        foretoken = services.foretoken("simulator")
        candidates = tuple(serving_space(resolved, devices))
        found = list(_evaluate(candidates, foretoken.simulate_serving))
        found.sort(key=lambda item: (-item[1].goodput_rps, -item[1].output_throughput_tps))
        columns = (
            "layout",
            "goodput (1/s)",
            "SLO attainment",
            "TTFT p99 (ms)",
            "TPOT p99 (ms)",
            "output tokens/s per device",
            "verdict",
        )
        rows = [
            (
                name,
                report.goodput_rps,
                report.slo_attainment_ratio,
                report.ttft_ms.p99,
                report.tpot_ms.p99,
                report.output_throughput_tps_per_gpu,
                report.feasibility.reason or "ok",
            )
            for name, report in found
        ]
        note(f"{len(found)} layouts simulated")
        title = f"{resolved.model.name} on {devices} {resolved.device}"
        state.print_object(dict(found), lambda: build_table(title, columns, rows))


@app.command()
def training(
    context: typer.Context,
    scenario: Annotated[Path, typer.Argument(help="Scenario file (YAML); its layout is ignored.")],
    devices: Annotated[int, typer.Option(help="Devices to train on.")] = 8,
    change: Annotated[list[str] | None, typer.Option("--set", help=_SET_HELP)] = None,
    top: Annotated[int, typer.Option(help="How many to show.")] = 20,
) -> None:
    """Simulate every tp x pp x dp, micro batch size and recompute mode; rank by step time.

    Strategies that do not fit are counted, with the reasons.
    """
    state = state_of(context)
    with open_composition(state) as services:
        resolved = read_training_scenario(scenario, scenario_changes(change))
        foretoken = services.foretoken("simulator")
        candidates = tuple(training_space(resolved, devices))
        found = list(_evaluate(candidates, foretoken.simulate_training))
        fitting = [item for item in found if item[1].feasibility.is_feasible]
        fitting.sort(key=lambda item: item[1].step_time_ms)
        note(f"{len(found)} strategies: {len(fitting)} fit, {len(found) - len(fitting)} do not")
        # The numbers in a reason differ from strategy to strategy; what it says does not.
        kinds = Counter(re.sub(r"\d[\d.]*", "_", r.feasibility.reason) for _, r in found)
        for kind, count in kinds.most_common():
            if kind:
                note(f"  {count} x {kind}")
        columns = (
            "strategy",
            "step (ms)",
            "low",
            "high",
            "MFU",
            "tokens/s per device",
            "memory (GiB)",
        )
        rows = [
            (
                name,
                report.step_time_ms,
                report.step_time_low_ms,
                report.step_time_high_ms,
                f"{report.mfu_ratio:.1%}",
                report.tokens_per_s_per_gpu,
                max(stage.total_bytes for stage in report.memory) / GIB,
            )
            for name, report in fitting[:top]
        ]
        title = f"{resolved.model.name} on {devices} {resolved.device}"
        state.print_object(dict(fitting[:top]), lambda: build_table(title, columns, rows))


def _evaluate(candidates: Sequence[S], simulate: Callable[[S], R]) -> Iterator[tuple[str, R]]:
    with show_progress(f"simulate {len(candidates)} candidates") as bar:
        for index, candidate in enumerate(candidates):
            bar.set(index / len(candidates), candidate.name)
            yield candidate.name, simulate(candidate)
