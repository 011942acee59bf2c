"""The latency models: `foretoken train`, `models`, `plan` (what to measure next) and `predict`."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from foretoken.app.cli.dim_text import order_dims, parse_values, parse_whole, split_words
from foretoken.app.cli.output_file import page_option
from foretoken.app.cli.request_options import Answers, OptionsOf, with_option_groups
from foretoken.app.cli.state import (
    CliState,
    build_table,
    check_output_path,
    format_cell,
    format_ratio,
    note,
    open_services,
    show_progress,
    stack,
)
from foretoken.app.compose import Composition
from foretoken.client.job_wait import wait_for_job
from foretoken.client.single_query import CallOptions, build_single_query, find_member
from foretoken.domain.alias import canonical_device
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import (
    DType,
    Explanation,
    LatencyEstimate,
    LatencyQuery,
    OperatorTable,
    Phase,
    Provenance,
    pick_estimate,
)
from foretoken.domain.measurements.latency_models import ModelVersion, TrainRequest
from foretoken.domain.measurements.planning import CandidateAxis, PlanRequest, ProfilePlan
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.results.accuracy import describe_accuracy
from foretoken.domain.results.echo import Echo
from foretoken.domain.results.report import PredictorTrainingReport

_SCORES = ("held out", "MAPE", "P90", "covered")
models = typer.Typer(
    help="Versions of the latency models, and which of them answers.", no_args_is_help=True
)
_WORDS = ("dtype", "phase", "framework", "variant", "seed")
# Next to number format and phase, the words that are no dimensions.
_OPTIONS = ("variant", "kernel", "framework", "model_version", "correction")

_Section = tuple[str, tuple[str, ...], list[tuple[object, ...]]]


_DEVICE = typer.Option(help="Device: see `foretoken list devices`.", callback=canonical_device)


@with_option_groups
def train(
    context: typer.Context,
    request: TrainRequest,
    splits: Annotated[
        bool, typer.Option("--splits", help="A row for each kind of points left out.")
    ] = False,
    report: Annotated[Path | None, page_option("--report")] = None,
    job: Annotated[
        str, typer.Option(help="Train nothing, and show what this training found.")
    ] = "",
) -> None:
    """Train latency models on all measurements in the catalog and make them the active ones.

    The table shows how well each model predicts points it was not trained on, as the mean (MAPE)
    and the 90th percentile (P90) of the error, and how often its 90 % interval covered the truth.
    """
    with open_services(context) as (state, services):
        if job and request != TrainRequest():
            reason = "a past training has its own device, operator and seed"
            raise InvalidRequestError.of_field("--job", reason)
        found = (
            services.predictor.get_training_report(job) if job else train_models(services, request)
        )
        state.print_object(found, lambda: training_table(found, is_by_split=splits))
        if report is not None:
            from foretoken.predictor.report.page import render_page

            report.write_text(render_page(found), encoding="utf-8")
            note(f"page written to {report}")


def training_table(report: PredictorTrainingReport, *, is_by_split: bool) -> Table:
    """Return the table of a report: a row per operator and device, or per split of each."""
    title = (
        f"Model {report.model_version} from {report.num_rows:,} rows"
        f" in {report.cpu_s:.1f} CPU seconds"
    )
    if report.num_reused:
        title += f"; {report.num_reused:,} kept from before"
    if is_by_split:
        columns = ("device", "operator", "split", *_SCORES)
        return build_table(title, columns, list(_rows_by_split(report)))
    return build_table(title, ("device", "operator", "rows", *_SCORES), list(_rows(report)))


def train_models(services: Composition, request: TrainRequest) -> PredictorTrainingReport:
    """Train, showing how far it is, and return what was found."""
    created = services.predictor.create_training(request)
    with show_progress("train") as update:
        wait_for_job(services.predictor, created, update)
    note(f"to see this again: foretoken train --job {created.job_id}")
    return services.predictor.get_training_report(created.job_id)


def _rows(report: PredictorTrainingReport) -> Iterator[tuple[object, ...]]:
    for entry in report.operators:
        yield (
            entry.device,
            entry.operator,
            entry.num_rows,
            *_score_cells(
                entry.num_held_out,
                entry.held_out_mape_ratio,
                entry.held_out_p90_ratio,
                entry.interval_coverage_ratio,
            ),
        )


def _rows_by_split(report: PredictorTrainingReport) -> Iterator[tuple[object, ...]]:
    for entry in report.operators:
        for score in entry.splits:
            yield (
                entry.device,
                entry.operator,
                score.split,
                *_score_cells(
                    score.num_held_out,
                    score.mape_ratio,
                    score.p90_ratio,
                    score.interval_coverage_ratio,
                ),
            )


def _score_cells(num_held_out: int, *ratios: float) -> tuple[object, ...]:
    return (num_held_out, *(format_ratio(ratio, num_held_out) for ratio in ratios))


@models.command("list")
def list_models(context: typer.Context) -> None:
    """List the stored versions, newest first."""
    with open_services(context) as (state, services):
        _print_models(state, services.predictor.list_models())


@models.command()
def use(
    context: typer.Context,
    version: Annotated[str, typer.Argument(help="The version, or its beginning.")],
) -> None:
    """Make a version the one that answers; the others stay for whoever names them."""
    with open_services(context) as (state, services):
        _print_models(state, [services.predictor.activate_model(version)])


def _print_models(state: CliState, models: Sequence[ModelVersion]) -> None:
    state.print_items(
        "Latency models",
        models,
        {
            "version": "version",
            "active": lambda model: "yes" if model.is_active else "-",
            "created": "created_at",
            "points": "num_rows",
            "snapshot": "snapshot_hash",
        },
    )


@with_option_groups
def plan(
    context: typer.Context,
    answers: Annotated[Answers, OptionsOf(PlanRequest)],
    axes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUES...]",
            help="Values of its dimensions: `m=1,2,4`, `m=1:4096` (doubling) or `m=128:1024:128`"
            " (in steps); none take the operator's own sweep, a collective's inside a node. Also"
            " `dtype=`, `phase=backward`, `framework=vllm`, `variant=`, `seed=`.",
        ),
    ] = None,
    points_csv: Annotated[
        Path | None,
        typer.Option(help="Write the points here, as CSV.", callback=check_output_path),
    ] = None,
) -> None:
    """Rank points to profile by the error that measuring them removes for the GPU time it takes.

    Example: `foretoken plan gemm m=1:8192 n=4096,8192 k=4096,8192 --device a30 --budget 60s`
    """
    with open_services(context) as (state, services):
        said, values = split_words(axes or [], _WORDS)
        request = PlanRequest(
            **answers.read(),
            dtype=find_member(DType, said.get("dtype", "bf16"), "dtype"),
            phase=find_member(Phase, said.get("phase", "forward"), "phase"),
            axes=tuple(
                CandidateAxis(dim=name, values=parse_values(name, text))
                for name, text in values.items()
            ),
            framework=said.get("framework", ""),
            variant=said.get("variant", ""),
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


@with_option_groups
def predict(
    context: typer.Context,
    operator: Annotated[str, typer.Argument(help="Operator: see `foretoken list operators`.")],
    dims: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=VALUE...",
            help="Its dimensions; also `dtype=`, `phase=backward`, `variant=quant=fp8_block`,"
            " `kernel=flashinfer`, `framework=vllm`, `model_version=`, `correction=`.",
        ),
    ],
    device: Annotated[str, _DEVICE],
    options: CallOptions,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the limits, models and points behind it.")
    ] = False,
) -> None:
    """Estimate how long one operator takes, with a 90 % interval and what it rests on.

    Example: `foretoken predict gemm m=1024 n=4096 k=4096 dtype=bf16 --device a30 --explain`
    """
    with open_services(context) as (state, services):
        said, sizes = split_words(dims, ("dtype", "phase", *_OPTIONS))
        words: dict[str, Any] = {name: said[name] for name in _OPTIONS if name in said}
        query = build_single_query(
            operator,
            {name: parse_whole(name, value) for name, value in sizes.items()},
            device=device,
            dtype=said.get("dtype", "bf16"),
            phase=said.get("phase", "forward"),
            options=replace(options, **words),
        )
        if explain:
            explanation = services.predictor.explain(query)
            state.print_object(
                explanation,
                lambda: _explanation_table(operator, device, explanation),
                _echo(query, explanation.estimate),
            )
        else:
            estimate = pick_estimate(services.predictor.predict(query))
            state.print_object(
                estimate,
                lambda: estimate_table(operator, device, estimate),
                _echo(query, estimate),
            )


def _echo(query: LatencyQuery, estimate: LatencyEstimate) -> Echo:
    """Return the question of a call as it was understood, and what would measure it."""
    (table,) = query.tables
    sizes = {name: int(column[0]) for name, column in table.columns.items()}
    dims = " ".join(f"{name}={value}" for name, value in order_dims(table.operator, sizes).items())
    how = (
        table.dtype.name.lower(),
        table.phase.name.lower(),
        table.variant,
        table.kernel,
        query.framework,
    )
    place = f"{query.device}, {query.topology}" if query.topology else query.device
    question = f"{table.operator} {dims} in {' '.join(word for word in how if word)} on {place}"
    share = {estimate.provenance.name.lower(): 1.0}
    if estimate.provenance is Provenance.MEASURED:
        return Echo(question=question, time_ratio_by_provenance=share)
    facts = {
        "group": find_operator(table.operator).group,
        "provenance": estimate.provenance.name.lower(),
    }
    return Echo(
        question=question,
        time_ratio_by_provenance=share,
        accuracy=describe_accuracy("operators", facts),
        narrowing=f"{_measuring(table, query.device)}; then `foretoken train`",
    )


def _measuring(table: OperatorTable, device: str) -> str:
    """Return what would measure a call, by the kind of its operator."""
    group, options = find_operator(table.operator).group, f"--device {device}"
    if group == "lora":  # the profiler has no kernel of it
        return "rows of it that you measured (`foretoken catalog import generic FILE`)"
    if group == "host":
        return f"`foretoken profile host {options}` where the device is"
    options += f" --operator {table.operator} --dtype {table.dtype.name.lower()}"
    command = "profile collectives" if group == "communication" else "profile"
    return f"`foretoken {command} {options}` where the device is"


def estimate_table(operator: str, device: str, estimate: LatencyEstimate) -> Table:
    """Return an estimate with its interval, and below it what it rests on."""
    cells: dict[str, object] = {"latency (µs)": estimate.latency_us}
    if estimate.correction_factor != 1.0:
        cells["uncorrected (µs)"] = estimate.raw_latency_us
    cells |= {
        "low (µs)": estimate.low_us,
        "high (µs)": estimate.high_us,
        "provenance": estimate.provenance.name.lower(),
        "model version": estimate.model_version or "-",
    }
    table = build_table(f"{operator} on {device}", tuple(cells), [tuple(cells.values())])
    return stack(table, *_grounds(operator, estimate))


def _grounds(operator: str, estimate: LatencyEstimate) -> Iterator[str]:
    """Yield what an estimate rests on, line by line."""
    if estimate.basis:
        yield f"rests on {estimate.basis}"
    if estimate.nearest:
        dims = order_dims(operator, estimate.nearest)
        point = " ".join(f"{name}={value}" for name, value in dims.items())
        away = f"a factor {2**estimate.nearest_octaves:.4g} away"
        where = away if estimate.nearest_octaves else "this very point"
        yield f"nearest measurement: {format_cell(estimate.nearest_us)} µs at {point}, {where}"


def _explanation_table(operator: str, device: str, explanation: Explanation) -> Table:
    return stack(
        estimate_table(operator, device, explanation.estimate),
        _limits_table(explanation),
        *(build_table(*section) for section in _sections(operator, explanation) if section[-1]),
    )


def _limits_table(explanation: Explanation) -> Table:
    limits = (explanation.floor_us, explanation.compute_us, explanation.memory_us)
    row = (*limits, f"{explanation.efficiency_ratio:.1%}", explanation.tier)
    columns = ("launch (µs)", "compute (µs)", "memory or links (µs)", "efficiency", "lies")
    return build_table("What the device allows", columns, [row])


def _sections(operator: str, explanation: Explanation) -> Iterator[_Section]:
    """Yield title, columns and rows of each list."""
    yield (
        "Ways of estimating",
        ("way", "says (µs)", "weight"),
        [(m.name, m.latency_us, f"{m.weight_ratio:.1%}") for m in explanation.members],
    )
    yield (
        "What moves the trees' answer",
        ("feature", "value", "factor"),
        [(c.feature, c.value, c.factor) for c in explanation.contributions],
    )
    points = [order_dims(operator, near.dims) for near in explanation.neighbours]
    yield (
        "Nearest measurements",
        (*(points[0] if points else ()), "took (µs)", "away (octaves)"),
        [
            (*point.values(), near.latency_us, near.distance_octaves)
            for point, near in zip(points, explanation.neighbours, strict=True)
        ],
    )
