"""`foretoken profile`: time operators, or the host, and record them."""

import csv
import io
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from foretoken.app.cli.dim_text import parse_whole
from foretoken.app.cli.profile_collectives import collectives, find_place, serve_place
from foretoken.app.cli.profile_model import closure, graph
from foretoken.app.cli.request_options import Answers, OptionsOf, with_option_groups
from foretoken.app.cli.state import (
    CliState,
    item_table,
    note,
    open_composition,
    open_services,
    show_progress,
    stack,
    state_of,
)
from foretoken.app.compose import Composition, on_kubernetes
from foretoken.app.config import EMBEDDED
from foretoken.client.single_query import find_member
from foretoken.domain import schema
from foretoken.domain.alias import canonical_device
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import find_device
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.measurements.planning import PlanRequest
from foretoken.domain.measurements.profiling import ProfileOutline, ProfileReport, ProfileRequest
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.ports import CatalogPort
from foretoken.domain.requests.option import flag, option
from foretoken.domain.text_file import read_json, read_text
from foretoken.domain.units import describe_seconds
from foretoken.jobs.runner import JobProgress

if TYPE_CHECKING:
    from foretoken.profiler.host.measuring import HostReport

app = typer.Typer(invoke_without_command=True)
AskedProfile = Annotated[Answers, OptionsOf(ProfileRequest, defaults={"device": "cpu"})]
WrittenRequest = Annotated[
    Path | None,
    typer.Option(
        "--request",
        help="A profile written by another process, as JSON: its fields are ProfileRequest's."
        " The other options of what to time, and how, are left alone then.",
        exists=True,
        dir_okay=False,
    ),
]


_NUM_NAME_DIGITS = 12
_PLACES = ("local", "kubernetes")
# Processes that a CPU lends to collectives.
_NUM_CPU_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """Points that the predictor requests."""

    planned: tuple[str, ...] = option(
        (),
        "Time the points of this operator that lower the predictor's error most, within"
        " --budget. Repeatable.",
        syntax="words",
    )
    budget_s: float = option(
        60.0,
        "With --planned: GPU time for all of them, `60s` or `10min`.",
        names=("--budget",),
        syntax="duration",
    )


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Where it runs."""

    on: str | None = option(
        None, "`local`, or `kubernetes`: in pods of a cluster (default: configured)."
    )
    shards: int = option(0, "With --on kubernetes: how many pods (0: configured).", minimum=0)
    dry_run: bool = flag("Only show what would be timed, as `profile plan`.")


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
    node = find_place(state.config)
    if not node.is_leader:
        serve_place(node, device, _NUM_CPU_RANKS)
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
    names = planning.planned
    dtype = request.dtypes[0] if request.dtypes else DType.BF16
    calls: list[OperatorCall] = []
    for operator in names:
        found = services.foretoken("predictor").plan(
            PlanRequest(
                device=request.device,
                operator=operator,
                dtype=dtype,
                budget_gpu_s=planning.budget_s / len(names),
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


def build_request(answers: Answers, written: Path | None) -> ProfileRequest:
    """Return the profile that a file has, or else the one that the options ask for.

    Raises:
        UnknownModelError, UnknownOperatorError: a name there is not.
        InvalidRequestError: a file or a value that is wrong, with its place.

    """
    if written is not None:
        return schema.decode(ProfileRequest, read_json(written, "request"), written.name)
    asked = answers.read()
    if asked.get("models"):
        asked.setdefault("tp_sizes", (1,))
    elif asked.get("has_training"):
        raise InvalidRequestError.of_field("training", "needs --model: what is trained?")
    else:
        asked.pop("tp_sizes", None)
    return schema.decode(ProfileRequest, asked)


def read_calls(_: str, path: Path) -> tuple[OperatorCall, ...]:
    """Return the calls of a CSV file of points; see `read_points`."""
    return tuple(read_points(path))


def read_points(path: Path) -> Iterator[OperatorCall]:
    """Yield the calls of a CSV file: columns for operator, dtype and phase, and each dimension.

    Further columns are left alone, but `variant` and `kernel`.

    Raises:
        UnknownOperatorError: an operator there is not.
        InvalidRequestError: a column or a value is missing or wrong, with its line.

    """
    reader = csv.DictReader(io.StringIO(read_text(path, "points")))
    try:
        _check_columns(path, reader.fieldnames or ())
        for row in reader:
            yield _call_of_row(row)
    except (InvalidRequestError, csv.Error) as err:
        place = f"{path}, line {reader.line_num}"
        raise InvalidRequestError.of_field("points", f"{place}: {err}") from err


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    missing = [name for name in ("operator", "dtype") if name not in columns]
    if missing:
        raise InvalidRequestError.of_field(
            "points", f"{path} has no column {', '.join(missing)}; it has {', '.join(columns)}"
        )


def _call_of_row(row: dict[str, str]) -> OperatorCall:
    spec = find_operator(row["operator"])
    dims = {name: parse_whole(name, row[name]) for name in spec.dim_names if row.get(name)}
    spec.check_call(dims)
    return OperatorCall(
        operator=spec.name,
        dtype=find_member(DType, row["dtype"], "dtype"),
        phase=find_member(Phase, row.get("phase") or "forward", "phase"),
        dims=dims,
        variant=row.get("variant") or "",
        kernel=row.get("kernel") or "",
    )


@with_option_groups
def plan(context: typer.Context, answers: AskedProfile, written: WrittenRequest = None) -> None:
    """Show what a profile would time: calls by operator, what is known, how long it takes.

    The device need not be here: `foretoken profile plan --device h200_sxm --model llama-3.1-8b`
    """
    with open_services(context) as (state, services):
        request = build_request(answers, written)
        outline = services.profiler.outline_profile(request)
        state.print_object(outline, lambda: outline_table(outline))


def devices(context: typer.Context) -> None:
    """List the devices present where the profiler runs."""
    with open_services(context) as (state, services):
        found = services.profiler.list_local_devices()
        rows = [(name, find_device(name).description) for name in found]
        state.print_rows("Devices present", ("device", "description"), rows)
        if len(found) == 1:
            note("GPUs are found through torch: is a CUDA build of it installed, and a driver?")


def outline_table(outline: ProfileOutline) -> Table:
    """Return what a profile would time: by operator, and in all."""
    table = item_table(
        f"Profile {outline.name} on {outline.device}",
        outline.operators,
        {
            "operator": "operator",
            "to time": "num_calls",
            "known": "num_covered",
            "about (s)": lambda entry: round(entry.estimated_s, 1),
        },
    )
    seconds = describe_seconds(outline.estimated_s)
    known = f"; {outline.num_covered:,} are known already" if outline.num_covered else ""
    remarks = [f"{outline.num_calls:,} calls to time in about {seconds}{known}"]
    if outline.num_too_long:
        remarks.append(f"{outline.num_too_long:,} take too long and are left out")
    if outline.num_failing:
        remarks.append(f"{outline.num_failing:,} will not fit the memory and be failed rows")
    return _below(table, outline.operators, [*remarks, *outline.notes])


def report_table(report: ProfileReport) -> Table:
    """Return what came of a profile: by operator, and in all."""
    table = item_table(
        f"Profile {report.name} on {report.device}",
        report.operators,
        {
            "operator": "operator",
            **{name: f"num_{name}" for name in ("measured", "failed", "flagged")},
            "seconds": lambda entry: round(entry.wall_s, 1),
            "interval ±": lambda entry: (
                f"{entry.interval_ratio:.2%}" if entry.interval_ratio else "-"
            ),
        },
    )
    skipped = f", {report.num_skipped:,} known, too long or left" if report.num_skipped else ""
    counts = f"{report.num_measured:,} measured, {report.num_failed:,} failed{skipped}"
    remarks = [f"{counts}, in {describe_seconds(report.wall_s)}"]
    if report.num_repeats:
        remarks.append(
            f"repeatability: {report.num_repeats:,} points timed twice differ by"
            f" {report.repeat_median_ratio:.2%} in the median, {report.repeat_p90_ratio:.2%} at P90"
        )
    if report.run_id:
        remarks.append(f"recorded as run {report.run_id}")
    return _below(table, report.operators, [*remarks, *report.notes])


def _below(table: Table, rows: Sequence[object], remarks: Sequence[str]) -> Table:
    """Return the remarks below a table, alone where it has no rows."""
    return stack(table, *remarks) if rows else stack(*remarks)


def host(
    context: typer.Context,
    device: Annotated[
        str,
        typer.Option(help="Device of this machine: `cpu`, `h200_sxm`.", callback=canonical_device),
    ] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points: some seconds.")] = False,
) -> None:
    """Time what the host adds to the kernels, and record it as `launch_gap`, `host_step`.

    On a GPU: how long the host needs to launch kernels, one by one, as a CUDA graph, and through
    the modules of a model; on a CPU, what a model adds to its operators. And what sampling,
    fetching tokens and making text of them take for a batch. `foretoken validate steps` needs it;
    `launch_us` of an engine's or a trainer's rules may be set to what one kernel more takes.

    Example: `foretoken profile host --device h200_sxm`
    """
    state = state_of(context)
    if state.config.endpoints.profiler != EMBEDDED:
        raise typer.BadParameter(
            "the host is timed in this process: leave out --endpoint profiler=... and run the"
            " command on the machine of the device"
        )
    with open_composition(state) as services:
        num_threads = int(state.config.profiler.get("num_threads") or 0)
        report = _measure(services.catalog, device, quick=quick, num_threads=num_threads)
        state.print_object(report, lambda: host_table(report))


def _measure(catalog: CatalogPort, device: str, *, quick: bool, num_threads: int) -> "HostReport":
    try:
        from foretoken.profiler.host.measuring import measure_host
        from foretoken.profiler.local_device import find_local_device
    except ImportError as err:
        raise InvalidRequestError(
            "timing the host needs torch and transformers: pip install 'foretoken[profiler,graphs]'"
        ) from err
    with show_progress(f"time the host of {device}") as update:
        progress = JobProgress(update.set, threading.Event())
        return measure_host(
            find_local_device(device), catalog, progress, quick=quick, num_threads=num_threads
        )


def host_table(report: "HostReport") -> Table:
    """Return a report for a terminal."""
    columns = {
        "operator": "operator",
        "part": "part",
        "kernels or sequences": "largest",
        "takes (µs)": "latency_us",
        "each more (µs)": "slope_us",
    }
    title = f"Host of {report.device}: {report.num_rows} rows in {report.wall_s:.1f} s"
    notes = list(report.notes)
    if report.num_flagged:
        notes.insert(
            0, f"{report.num_flagged} rows are flagged and not learned from: the machine was busy"
        )
    return stack(item_table(title, report.parts, columns), *notes)


for command in (plan, devices, closure, collectives, graph, host):
    app.command()(command)
