"""`foretoken search`: rank every layout of a deployment or a training run."""

from pathlib import Path
from typing import Annotated

import typer

from foretoken.app.cli.simulate import scenario_changes
from foretoken.app.cli.state import build_table, note, open_composition, show_progress, state_of
from foretoken.app.scenario_file import read_serving_scenario, read_training_scenario
from foretoken.domain.report import ServingReport, TrainingReport
from foretoken.domain.units import GIB
from foretoken.simulator.search.space import serving_space, training_space

app = typer.Typer(help="Rank every layout of a deployment or a training run.", no_args_is_help=True)

_SET_HELP = "Change one key of the scenario: `engine.max_num_seqs=64`. Repeatable."


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
        found: list[tuple[str, ServingReport]] = []
        for candidate in serving_space(resolved, devices):
            with show_progress(candidate.name) as update:
                report = services.foretoken("simulator").simulate_serving(
                    candidate, on_progress=update
                )
            found.append((candidate.name, report))
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
        found: list[tuple[str, TrainingReport]] = []
        for candidate in training_space(resolved, devices):
            with show_progress(candidate.name) as update:
                report = services.foretoken("simulator").simulate_training(
                    candidate, on_progress=update
                )
            found.append((candidate.name, report))
        fitting = [item for item in found if item[1].feasibility.is_feasible]
        fitting.sort(key=lambda item: item[1].step_time_ms)
        note(f"{len(found)} strategies: {len(fitting)} fit, {len(found) - len(fitting)} do not")
        for reason in sorted({r.feasibility.reason for _, r in found} - {""}):
            note(f"  {sum(r.feasibility.reason == reason for _, r in found)} x {reason}")
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
