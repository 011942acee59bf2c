"""`foretoken memory`: what a training strategy must hold on every device."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from foretoken.app.cli.output_file import check_page_option, page_option
from foretoken.app.cli.request_options import with_option_groups
from foretoken.app.cli.state import (
    build_table,
    describe_feasibility,
    leave_unless,
    note,
    open_services,
    parse_assignments,
    scenario_changes,
    stack,
)
from foretoken.app.scenario_file import build_training_scenario
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.plugins import read_yaml
from foretoken.domain.requests.option import option
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.training_run import TrainingMemoryReport
from foretoken.domain.results.training_report import StageMemory
from foretoken.domain.units import GIB

# Without a file and a batch every rank of the pipeline has twice its length in micro batches, which
# fills any schedule.
_ROUNDS = 2
_PARTS = ("weights", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """What is trained, on what and how. Options change what the scenario file says."""

    model: str = option(
        "",
        "Model: a preset (`foretoken list models`), or the path of a `config.json` or GGUF file.",
    )
    device: str = option("", "Device: see `foretoken list devices`.")
    layout: str = option("", "Degrees of parallelism: `tp=2,pp=4,dp=2,cp=1,ep=1`.")
    sequence_length: int | None = option(None, "Tokens of a sample (4096).", minimum=1)
    micro_batch: int | None = option(None, "Samples of a micro batch (1).", minimum=1)
    global_batch: int | None = option(
        None, "Samples of a step (without a file: as many as fill the pipeline).", minimum=1
    )
    change: tuple[str, ...] = option(
        (),
        "Set one key of the scenario: `recompute=full`, `zero_stage=1`,"
        " `trainer.profile=fsdp2`. Repeatable.",
        names=("--set",),
        syntax="words",
    )


@with_option_groups
def memory(
    context: typer.Context,
    scenario: Annotated[
        Path | None, typer.Argument(help="Scenario file (YAML); none needs --model and --device.")
    ] = None,
    *,
    strategy: StrategyOptions,
    page: Annotated[
        Path | None,
        page_option(
            "--html",
            text="Write a page with the picture here (`.html`).",
            check=check_page_option,
        ),
    ] = None,
) -> None:
    """Tell what every pipeline stage of a training strategy holds, and whether it fits.

    Nothing is timed and no trained predictor is needed: the answer takes milliseconds. Where
    something does not fit, single changes are tried and the best are named, and the exit status is
    3.

    Example: `foretoken memory --model llama-2-7b --device a100_sxm_80 --layout tp=2,pp=4,dp=2 --set
    zero_stage=1 --page memory.html`
    """
    with open_services(context) as (state, services):
        resolved = _read(scenario, strategy)
        report = services.plan_training_memory(resolved)
        state.print_object(report, lambda: memory_table(_title(resolved), report), report.echo)
        if page is not None:
            _write_page(page, _title(resolved), report)
            note(f"page written to {page}")
        leave_unless(report.feasibility.is_feasible)


def _title(scenario: TrainingScenario) -> str:
    devices = " and ".join(dict.fromkeys(scenario.stage_devices or (scenario.device,)))
    return f"{scenario.model.name} on {scenario.layout.num_devices} {devices}"


def _read(path: Path | None, strategy: StrategyOptions) -> TrainingScenario:
    changes = {**dict(_changes(strategy)), **scenario_changes(strategy.change)}
    if path is not None:
        return build_training_scenario(read_yaml(path, "scenario"), changes, path)
    for name, value in (("--model", strategy.model), ("--device", strategy.device)):
        if not value:
            raise InvalidRequestError.of_field(name, "is needed without a scenario file")
    if "global_batch_size" not in changes:
        names = ("layout.pp", "layout.dp", "micro_batch_size")
        sizes = [schema.decode(int, changes.get(name, 1), name) for name in names]
        changes["global_batch_size"] = _ROUNDS * math.prod(sizes)
    return build_training_scenario({}, changes, Path("memory.yaml"))


def _changes(strategy: StrategyOptions) -> Iterator[tuple[str, Any]]:
    words = [word for word in strategy.layout.split(",") if word]
    for axis, degree in parse_assignments(words).items():
        if not degree.isdecimal():
            raise InvalidRequestError.of_field("--layout", f"{axis} needs a number, not {degree!r}")
        yield f"layout.{axis.strip()}", int(degree)
    given = {
        "model": strategy.model or None,
        "device": strategy.device or None,
        "sequence_length": strategy.sequence_length,
        "micro_batch_size": strategy.micro_batch,
        "global_batch_size": strategy.global_batch,
    }
    yield from ((name, value) for name, value in given.items() if value is not None)


def memory_table(title: str, report: TrainingMemoryReport) -> Table:
    """Return a memory plan for a terminal: every stage by part, and what would help."""
    rows = [("fits", describe_feasibility(report.feasibility))]
    if report.memory:
        rows.append(("parameters", f"{report.num_params / 1e9:,.2f} billion"))
    parts: list[Table | str] = [build_table(title, ("", "value"), rows)]
    if report.memory:
        parts.append(_stage_table(report.memory))
    if report.notes:
        parts.append("\n" + "\n".join(f"- {text}" for text in report.notes))
    return stack(*parts)


def _stage_table(stages: tuple[StageMemory, ...]) -> Table:
    sizes = (*_PARTS, "reserved", "headroom", "device", "margin")
    rows = [
        (
            f"stage {stage.stage}",
            *(f"{getattr(stage, f'{size}_bytes') / GIB:.2f}" for size in sizes),
            f"{stage.num_in_flight:.3g}",
        )
        for stage in stages
    ]
    columns = ("", *sizes, "micro batches held")
    return build_table("Peak of one device (GiB)", columns, rows)


def _write_page(path: Path, title: str, report: TrainingMemoryReport) -> None:
    from foretoken.simulator.report.memory_sections import render_memory

    path.write_text(render_memory(title, report), encoding="utf-8")
