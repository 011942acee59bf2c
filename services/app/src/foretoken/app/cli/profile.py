"""`foretoken profile`: time operators and record them."""

import uuid
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from foretoken.app.cli.collective_place import find_place, serve_place
from foretoken.app.cli.duration import parse_s
from foretoken.app.cli.option_group import with_option_groups
from foretoken.app.cli.profile_closure import closure
from foretoken.app.cli.profile_collectives import collectives
from foretoken.app.cli.profile_graph import graph
from foretoken.app.cli.profile_host import host
from foretoken.app.cli.profile_options import AskedProfile, WrittenRequest, build_request
from foretoken.app.cli.profile_plan import devices, plan
from foretoken.app.cli.profile_text import outline_table, report_table
from foretoken.app.cli.state import CliState, fail, note, open_composition, show_progress, state_of
from foretoken.app.compose import Composition, on_kubernetes
from foretoken.domain.errors import ForetokenError
from foretoken.domain.measurements.estimate import DType, OperatorCall
from foretoken.domain.measurements.planning import PlanRequest
from foretoken.domain.measurements.profiling import ProfileRequest

app = typer.Typer(invoke_without_command=True)
app.command("plan")(plan)
app.command("devices")(devices)
app.command("closure")(closure)
app.command("collectives")(collectives)
app.command("graph")(graph)
app.command("host")(host)

_NUM_NAME_DIGITS = 12
_PLACES = ("local", "kubernetes")
# Processes that a CPU lends to collectives.
_NUM_CPU_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """Points that the predictor asks for."""

    planned: Annotated[
        list[str] | None,
        typer.Option(
            help="Time the points of this operator that lower the predictor's error most, within"
            " --budget. Repeatable."
        ),
    ] = None
    budget: Annotated[
        str, typer.Option(help="With --planned: GPU time for all of them, `60s` or `10min`.")
    ] = "60s"


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Where it runs."""

    on: Annotated[
        str | None,
        typer.Option(help="`local`, or `kubernetes`: in pods of a cluster (default: configured)."),
    ] = None
    shards: Annotated[
        int,
        typer.Option(min=0, help="With --on kubernetes: how many pods (0: configured)."),
    ] = 0
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be timed, as `profile plan`.")
    ] = False


@app.callback()
@with_option_groups
def profile(
    context: typer.Context,
    answers: AskedProfile,
    planning: PlanningOptions,
    place: PlaceOptions,
    written: WrittenRequest = None,
) -> None:
    """Time operators and stream them into the catalog.

    Rows are safe as they come: stop it as you like, the same command again goes on where it was.
    A case that fails (out of memory, no kernel) is a row with a reason.

    - A first look, a minute: `foretoken profile --quick`

    - A model on a GPU: `foretoken profile --device h200_sxm --model llama-3.1-8b --tp 1,2,4,8`

    - The same, training too, and how long it will take: `... --training --dry-run`

    - Where the predictor is least sure: `foretoken profile --device a30 --planned gemm --budget
    60s`

    - On a cluster: `foretoken profile --device h200_sxm --model ./config.json --on kubernetes
    --shards 8`
    """
    if context.invoked_subcommand is not None:
        return
    state = _at_place(state_of(context), place)
    if _has_served(state, answers.given["device"]):
        return
    with open_composition(state) as services:
        request = build_request(answers, written)
        if planning.planned:
            request = replace(request, calls=_planned_calls(services, request, planning))
        if place.dry_run:
            outline = services.profiler.outline_profile(request)
            state.print_object(outline, lambda: outline_table(outline))
            return
        if not request.skip_covered and not request.name:
            request = replace(request, name=uuid.uuid4().hex[:_NUM_NAME_DIGITS])
            note(f"if it is interrupted, go on with: --again --name {request.name}")
        note(f"profiling {request.device}; Ctrl-C stops, the same command again goes on")
        with show_progress("profile") as update:
            report = services.foretoken("profiler").profile(request, on_progress=update)
        state.print_object(report, lambda: report_table(report))
    if report.num_skipped and not (report.num_measured or report.num_failed):
        note("nothing was left to time: `foretoken profile plan` says why, --again times it anew")
    if report.num_failed and not report.num_measured:
        note("every case failed")
        raise typer.Exit(code=1)


def _has_served(state: CliState, device: str) -> bool:
    """Lend this node's devices to the one that leads, if another one does; return whether."""
    try:
        node = find_place(state.config)
        if not node.is_leader:
            serve_place(node, device, _NUM_CPU_RANKS)
    except ForetokenError as err:
        fail(err)
    return not node.is_leader


def _at_place(state: CliState, place: PlaceOptions) -> CliState:
    if place.on not in (None, *_PLACES):
        raise typer.BadParameter(f"--on is one of {', '.join(_PLACES)}")
    if place.on == "kubernetes":
        return state.with_config(on_kubernetes(state.config, place.shards))
    if place.shards:
        raise typer.BadParameter("--shards needs --on kubernetes")
    return state


def _planned_calls(
    services: Composition, request: ProfileRequest, planning: PlanningOptions
) -> tuple[OperatorCall, ...]:
    """Return the points that the predictor ranks first; each operator gets its part of the time."""
    names = planning.planned or []
    dtype = request.dtypes[0] if request.dtypes else DType.BF16
    calls: list[OperatorCall] = []
    for operator in names:
        found = services.foretoken("predictor").plan(
            PlanRequest(
                device=request.device,
                operator=operator,
                dtype=dtype,
                budget_gpu_s=parse_s(planning.budget, "--budget") / len(names),
                seed=request.seed,
            )
        )
        calls += [
            OperatorCall(operator=operator, dtype=dtype, dims=point.dims) for point in found.points
        ]
        note(
            f"{operator}: {len(found.points):,} points, expected mean error"
            f" {found.error_before_ratio:.1%} -> {found.error_after_ratio:.1%}"
        )
    return tuple(calls)
