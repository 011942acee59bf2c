"""`foretoken simulate`: evaluate a serving deployment or a training step."""

import csv
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from foretoken.app.cli.state import (
    build_table,
    check_output_path,
    note,
    open_composition,
    parse_assignments,
    show_progress,
    state_of,
)
from foretoken.app.scenario_file import read_serving_scenario, read_training_scenario
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.plugins import parse_yaml_value
from foretoken.domain.report import (
    RequestColumns,
    ServingReport,
    TrainingReport,
    describe_shares,
)
from foretoken.domain.scenario import ServingScenario
from foretoken.domain.units import GIB

app = typer.Typer(help="Evaluate a serving deployment or a training step.", no_args_is_help=True)

_SET_HELP = "Change one key of the scenario: `workload.rate_rps=4`. Repeatable."


@app.command()
def serving(
    context: typer.Context,
    scenario: Annotated[Path, typer.Argument(help="Scenario file (YAML).")],
    change: Annotated[list[str] | None, typer.Option("--set", help=_SET_HELP)] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Simulate at this request rate (1/s). Repeat for a load curve."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page with pictures here.", callback=check_output_path),
    ] = None,
    requests_csv: Annotated[
        Path | None,
        typer.Option(
            help="Write every request's times here, as CSV (one rate only).",
            callback=check_output_path,
        ),
    ] = None,
) -> None:
    """Simulate an inference deployment request by request.

    Prints TTFT, ITL, TPOT and end-to-end percentiles, throughput, goodput and utilisation, and
    what the estimates rest on.
    """
    state = state_of(context)
    with open_composition(state) as services:
        resolved = read_serving_scenario(scenario, scenario_changes(change))
        loads = _loads(resolved, rate or [])
        if requests_csv is not None and len(loads) > 1:
            raise InvalidRequestError.of_field("--requests-csv", "goes with one rate only")
        reports: list[ServingReport] = []
        for title, load in loads:
            with show_progress(title) as update:
                reports.append(
                    services.foretoken("simulator").simulate_serving(load, on_progress=update)
                )
        state.print_object(
            reports if len(reports) > 1 else reports[0],
            lambda: serving_table(resolved.name, reports),
        )
        if requests_csv is not None:
            _write_requests(requests_csv, reports[-1].requests)
            note(f"requests written to {requests_csv}")
        if html is not None:
            from foretoken.simulator.report.page import render_page, serving_sections

            title = f"{resolved.model.name} on {resolved.device}"
            html.write_text(render_page(title, serving_sections(reports)), encoding="utf-8")
            note(f"page written to {html}")


@app.command()
def training(
    context: typer.Context,
    scenario: Annotated[Path, typer.Argument(help="Scenario file (YAML).")],
    change: Annotated[list[str] | None, typer.Option("--set", help=_SET_HELP)] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page with pictures here.", callback=check_output_path),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write the pipeline as a Chrome/Perfetto trace here.", callback=check_output_path
        ),
    ] = None,
) -> None:
    """Simulate one optimizer step: time with its breakdown, memory per stage, MFU."""
    state = state_of(context)
    with open_composition(state) as services:
        resolved = read_training_scenario(scenario, scenario_changes(change))
        with show_progress("simulate") as update:
            report = services.foretoken("simulator").simulate_training(resolved, on_progress=update)
        state.print_object(report, lambda: training_table(resolved.name, report))
        if html is not None:
            from foretoken.simulator.report.page import render_page, training_sections

            title = f"{resolved.model.name} on {resolved.layout.num_devices} {resolved.device}"
            html.write_text(render_page(title, training_sections(report)), encoding="utf-8")
            note(f"page written to {html}")
        if trace is not None:
            from foretoken.simulator.report.trace import chrome_trace

            trace.write_text(json.dumps(chrome_trace(report)), encoding="utf-8")
            note(f"trace written to {trace}")


def _loads(
    scenario: ServingScenario, rates: Sequence[float]
) -> Sequence[tuple[str, ServingScenario]]:
    """Return the scenario at every rate, with what to call it; a trace has a rate of its own."""
    workload = scenario.workload
    if workload.trace_requests:
        if rates:
            reason = "a trace has its own arrivals; stretch them with --set workload.time_scale=..."
            raise InvalidRequestError.of_field("--rate", reason)
        return [(f"simulate {len(workload.trace_requests)} requests of the trace", scenario)]
    return [
        (f"simulate at {rate:g}/s", replace(scenario, workload=replace(workload, rate_rps=rate)))
        for rate in sorted(rates) or [workload.rate_rps]
    ]


def scenario_changes(words: Sequence[str] | None) -> dict[str, Any]:
    """Return `--set` words as overrides by dotted path, their values read as YAML."""
    return {
        name: parse_yaml_value(value, f"--set {name}")
        for name, value in parse_assignments(words or []).items()
    }


def serving_table(title: str, reports: Sequence[ServingReport]) -> Table:
    """Return the table of one or more serving reports, a column per report."""
    rows: list[list[object]] = [["feasible", *(_feasible(r.feasibility) for r in reports)]]
    headers = ["offered requests", *(f"{report.offered_rps:.4g}/s" for report in reports)]
    if not any(report.feasibility.is_feasible for report in reports):
        return build_table(title, headers, rows)
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_latency_ms", "queueing_ms"):
        for statistic in ("mean", "p50", "p90", "p99"):
            cells = [getattr(getattr(report, name), statistic) for report in reports]
            label = name.removesuffix("_ms").replace("_", " ")
            rows.append([f"{label} {statistic} (ms)", *cells])
    for title_of_row, name in _SERVING_ROWS:
        rows.append([title_of_row, *(getattr(report, name) for report in reports)])
    rows.append(["step time interval", *(_interval(report) for report in reports)])
    rows.append(
        ["rests on", *(describe_shares(report.step_time_ratio_by_provenance) for report in reports)]
    )
    return build_table(title, headers, rows)


def training_table(title: str, report: TrainingReport) -> Table:
    """Return the table of a training report."""
    rows: list[list[object]] = [
        ["feasible", _feasible(report.feasibility)],
        ["step time (ms)", report.step_time_ms],
        [
            "step time, low to high (ms)",
            f"{report.step_time_low_ms:.4g} to {report.step_time_high_ms:.4g}",
        ],
        ["MFU", f"{report.mfu_ratio:.1%}"],
        ["bubble", f"{report.bubble_ratio:.1%}"],
        ["tokens/s", report.tokens_per_s],
        ["tokens/s per device", report.tokens_per_s_per_gpu],
        ["devices", report.num_devices],
        ["micro batches", report.num_micro_batches],
    ]
    for group, group_ms in report.step_time_ms_by_group.items():
        rows.append([f"  {group} (ms)", group_ms])
    for stage in report.memory:
        share = stage.total_bytes / report.device_memory_bytes if report.device_memory_bytes else 0
        rows.append(
            [f"memory, stage {stage.stage} (GiB)", f"{stage.total_bytes / GIB:.3g} ({share:.0%})"]
        )
    rows.append(["rests on", describe_shares(report.step_time_ratio_by_provenance)])
    return build_table(title, ["", "value"], rows)


_SERVING_ROWS = (
    ("requests completed", "num_completed"),
    ("request throughput (1/s)", "request_throughput_rps"),
    ("input throughput (tokens/s)", "input_throughput_tps"),
    ("output throughput (tokens/s)", "output_throughput_tps"),
    ("output throughput per device (tokens/s)", "output_throughput_tps_per_gpu"),
    ("goodput (requests/s)", "goodput_rps"),
    ("SLO attainment (0-1)", "slo_attainment_ratio"),
    ("device utilisation (0-1)", "utilization_ratio"),
    ("MFU (0-1)", "mfu_ratio"),
    ("KV blocks", "num_kv_blocks"),
    ("KV use, mean (0-1)", "kv_utilization_ratio_mean"),
    ("preemptions", "num_preemptions"),
    ("serving steps", "num_serving_steps"),
    ("mean batch size", "batch_size_mean"),
)


def _feasible(feasibility: Any) -> str:
    return "yes" if feasibility.is_feasible else f"no: {feasibility.reason}"


def _interval(report: ServingReport) -> str:
    return f"{report.step_time_low_ratio:.2f} to {report.step_time_high_ratio:.2f} x"


def _write_requests(path: Path, columns: RequestColumns) -> None:
    names = [field.name for field in fields(columns)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(zip(*(getattr(columns, name) for name in names), strict=True))
