"""`foretoken simulate`: evaluate a serving deployment or a training step."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
from foretoken.app.cli.table_file import check_table_path, write_table
from foretoken.app.scenario_file import read_serving_scenario, read_training_scenario
from foretoken.client.facade import Foretoken
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.plugins import parse_yaml_value
from foretoken.domain.report import (
    ServingReport,
    TrainingReport,
    describe_shares,
)
from foretoken.domain.scenario import ServingScenario
from foretoken.domain.units import GIB
from foretoken.wire.arrow import read_table

app = typer.Typer(help="Evaluate a serving deployment or a training step.", no_args_is_help=True)

_TABLES = ("requests", "steps", "series")

_SET_HELP = "Change one key of the scenario: `workload.rate_rps=4`. Repeatable."


@app.command()
def serving(  # noqa: PLR0913, PLR0917 - a command's options
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
    table: Annotated[
        list[str] | None,
        typer.Option(
            help="Write a table here, as .parquet or .csv: `requests=FILE`, `steps=FILE`,"
            " `series=FILE` (one rate only). Repeatable."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write steps and requests as a Chrome/Perfetto trace here (one rate only).",
            callback=check_output_path,
        ),
    ] = None,
) -> None:
    """Simulate an inference deployment request by request.

    Prints TTFT, ITL, TPOT and end-to-end percentiles, throughput, goodput, utilisation, cost, and
    what the estimates rest on. The tables have every request, every step of the engines, and the
    run second by second.

    Example: `foretoken simulate serving docs/examples/serving.yaml --rate 1 --rate 2 --rate 4
    --html load.html`
    """
    state = state_of(context)
    tables = _table_paths(table or [])
    with open_composition(state) as services:
        resolved = read_serving_scenario(scenario, scenario_changes(change))
        loads = _loads(resolved, rate or [])
        if len(loads) > 1 and (tables or trace):
            raise InvalidRequestError.of_field(
                "--rate", "tables and traces are of one run: give one rate"
            )
        foretoken = services.foretoken("simulator")
        reports = list(_simulate_loads(foretoken, loads))
        state.print_object(
            reports if len(reports) > 1 else reports[0],
            lambda: serving_table(resolved.name, reports),
        )
        _write_tables(foretoken, reports[-1], tables)
        if trace is not None:
            _write_serving_trace(foretoken, reports[-1], trace)
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


def _table_paths(words: Sequence[str]) -> dict[str, Path]:
    """Return `steps=FILE` words as paths by table."""
    paths: dict[str, Path] = {}
    for name, file in parse_assignments(words).items():
        if name not in _TABLES:
            raise typer.BadParameter(f"--table {name}: the tables are {', '.join(_TABLES)}")
        paths[name] = check_table_path(Path(file))
    return paths


def _loads(
    scenario: ServingScenario, rates: Sequence[float]
) -> Sequence[tuple[str, ServingScenario]]:
    """Return the scenario at every rate, with what to call it; a trace has a rate of its own."""
    workload = scenario.workload
    if not all(rate > 0 for rate in rates):
        raise InvalidRequestError.of_field("--rate", "must be positive")
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
    headers = ["offered requests", *(_offered(report) for report in reports)]
    if not any(report.feasibility.is_feasible for report in reports):
        return build_table(title, headers, rows)
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_latency_ms", "queueing_ms"):
        for statistic in ("mean", "p50", "p90", "p99"):
            cells = [getattr(getattr(report, name), statistic) for report in reports]
            label = name.removesuffix("_ms").replace("_", " ")
            rows.append([f"{label} {statistic} (ms)", *cells])
    for title_of_row, name in _SERVING_ROWS:
        rows.append([title_of_row, *(getattr(report, name) for report in reports)])
    for title_of_row, name in _OPTIONAL_ROWS:
        cells = [getattr(report, name) for report in reports]
        if any(cells):
            rows.append([title_of_row, *cells])
    refused = [sum(report.num_refused_by_reason.values()) for report in reports]
    if any(refused):
        rows.append(["requests refused", *(_refused(report) for report in reports)])
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
    ("MBU (0-1)", "mbu_ratio"),
    ("KV blocks", "num_kv_blocks"),
    ("KV use, mean (0-1)", "kv_utilization_ratio_mean"),
    ("preemptions", "num_preemptions"),
    ("serving steps", "num_serving_steps"),
    ("mean batch size", "batch_size_mean"),
)


# Shown where a run has them.
_OPTIONAL_ROWS = (
    ("prefix cache hits (0-1)", "prefix_cache_hit_ratio"),
    ("cost (USD per million output tokens)", "usd_per_million_output_tokens"),
    ("cost (USD per million tokens)", "usd_per_million_tokens"),
    ("energy (J per output token)", "energy_j_per_output_token"),
    ("mean power (W)", "power_w_mean"),
)


def _offered(report: ServingReport) -> str:
    return f"{report.offered_rps:.4g}/s" if report.offered_rps else "all at once"


def _refused(report: ServingReport) -> str:
    named = (f"{count} {reason}" for reason, count in report.num_refused_by_reason.items() if count)
    return ", ".join(named) or "0"


def _feasible(feasibility: Any) -> str:
    return "yes" if feasibility.is_feasible else f"no: {feasibility.reason}"


def _interval(report: ServingReport) -> str:
    return f"{report.step_time_low_ratio:.2f} to {report.step_time_high_ratio:.2f} x"


def _simulate_loads(
    foretoken: Foretoken, loads: Sequence[tuple[str, ServingScenario]]
) -> Iterator[ServingReport]:
    for title, load in loads:
        with show_progress(title) as update:
            yield foretoken.simulate_serving(load, on_progress=update)


def _write_tables(foretoken: Foretoken, report: ServingReport, paths: Mapping[str, Path]) -> None:
    for name, path in paths.items():
        write_table(read_table(foretoken.read_serving_table(report, name)), path)
        note(f"{name} written to {path}")


def _write_serving_trace(foretoken: Foretoken, report: ServingReport, path: Path) -> None:
    from foretoken.simulator.report.serving_trace import chrome_trace

    steps, requests = (
        read_table(foretoken.read_serving_table(report, name)) for name in ("steps", "requests")
    )
    path.write_text(json.dumps(chrome_trace(steps, requests)), encoding="utf-8")
    note(f"trace written to {path}; open it in https://ui.perfetto.dev")
