"""`foretoken plan`: which points to profile next."""

import csv
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from foretoken.app.cli.call_words import order_dims, parse_values, parse_whole, split_words
from foretoken.app.cli.duration import parse_s
from foretoken.app.cli.stack import stack
from foretoken.app.cli.state import build_table, check_output_path, note, open_composition, state_of
from foretoken.client.single_query import find_member
from foretoken.domain.measurements.estimate import DType, Phase
from foretoken.domain.measurements.planning import CandidateAxis, PlanRequest, ProfilePlan

_WORDS = ("dtype", "phase", "framework", "variant", "seed")


def plan(  # noqa: PLR0913, PLR0917 - the parameters are the command's options
    context: typer.Context,
    operator: Annotated[str, typer.Argument(help="Operator: see `foretoken list operators`.")],
    device: Annotated[str, typer.Option(help="Device: see `foretoken list devices`.")],
    axes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUES...]",
            help="Values of its dimensions: `m=1,2,4`, `m=1:4096` (doubling) or `m=128:1024:128`"
            " (in steps); none take the operator's own sweep, a collective's inside a node. Also"
            " `dtype=`, `phase=backward`, `framework=vllm`, `variant=`, `seed=`.",
        ),
    ] = None,
    topology: Annotated[str, typer.Option(help="Topology, for collectives.")] = "",
    budget: Annotated[str, typer.Option(help="GPU time there is: `60s`, `10min`.")] = "10min",
    max_points: Annotated[int, typer.Option(help="Most points; 0: as many as fit.")] = 0,
    points_csv: Annotated[
        Path | None,
        typer.Option(help="Write the points here, as CSV.", callback=check_output_path),
    ] = None,
) -> None:
    """Rank points to profile by the error that measuring them removes for the GPU time it takes.

    Example: `foretoken plan gemm m=1:8192 n=4096,8192 k=4096,8192 --device a30 --budget 60s`
    """
    state = state_of(context)
    with open_composition(state) as services:
        said, values = split_words(axes or [], _WORDS)
        request = PlanRequest(
            device=device,
            operator=operator,
            dtype=find_member(DType, said.get("dtype", "bf16"), "dtype"),
            phase=find_member(Phase, said.get("phase", "forward"), "phase"),
            axes=tuple(
                CandidateAxis(dim=name, values=parse_values(name, text))
                for name, text in values.items()
            ),
            topology=topology,
            framework=said.get("framework", ""),
            variant=said.get("variant", ""),
            budget_gpu_s=parse_s(budget, "--budget"),
            max_num_points=max_points,
            seed=parse_whole("seed", said.get("seed", "0")),
        )
        found = services.foretoken("predictor").plan(request)
    state.print_object(found, lambda: _plan_table(request, found))
    if points_csv is not None:
        _write_points(points_csv, request, found)
        note(f"points written to {points_csv}")


def _plan_table(request: PlanRequest, found: ProfilePlan) -> Table:
    names = _dim_names(request, found)
    rows = [
        (
            rank,
            *order_dims(request.operator, point.dims).values(),
            point.latency_us,
            point.gpu_s,
            f"{point.error_ratio:.2%}",
        )
        for rank, point in enumerate(found.points, start=1)
    ]
    columns = ("", *names, "takes (µs)", "GPU time (s)", "mean error then")
    title = f"{request.operator} on {request.device}: what to profile next"
    table = build_table(title, columns, rows)
    return stack(
        table,
        f"expected mean error {found.error_before_ratio:.2%} -> {found.error_after_ratio:.2%}"
        f" with {len(found.points):,} points in {found.gpu_s:.3g} GPU seconds;"
        f" of {found.num_candidates:,} candidates {found.num_measured:,} are measured already",
    )


def _dim_names(request: PlanRequest, found: ProfilePlan) -> tuple[str, ...]:
    return tuple(order_dims(request.operator, found.points[0].dims)) if found.points else ()


def _write_points(path: Path, request: PlanRequest, found: ProfilePlan) -> None:
    names = _dim_names(request, found)
    columns = ("operator", "dtype", "phase", *names, "latency_us", "gpu_s", "error_ratio")
    kind = (request.operator, request.dtype.name.lower(), request.phase.name.lower())
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for point in found.points:
            figures = (point.latency_us, point.gpu_s, point.error_ratio)
            writer.writerow((*kind, *order_dims(request.operator, point.dims).values(), *figures))
