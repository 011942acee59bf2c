"""`foretoken simulate serving`: evaluate a serving deployment."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from foretoken.app.cli.exit_status import leave_unless
from foretoken.app.cli.page_file import write_page
from foretoken.app.cli.stack import stack
from foretoken.app.cli.state import (
    build_table,
    check_output_path,
    describe_feasibility,
    note,
    note_jobs,
    open_composition,
    scenario_changes,
    show_progress,
    state_of,
)
from foretoken.app.cli.table_file import table_paths, write_stream
from foretoken.app.scenario_file import read_serving_scenario
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.report import PoolReport, ServingReport, describe_shares
from foretoken.domain.scenario import ServingScenario

if TYPE_CHECKING:
    from foretoken.client.facade import Foretoken

_TABLES = ("requests", "steps", "series")

_SET_HELP = "Change one key of the scenario: `workload.rate_rps=4`. Repeatable."


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

    Prints TTFT, ITL, TPOT and end-to-end percentiles, throughput, goodput, utilisation, cost, what
    the pools of a cluster did, and what the estimates rest on. The tables have every request, every
    step of the engines, and the run second by second. The exit status is 3 where nothing can run.

    Example: `foretoken simulate serving docs/examples/serving.yaml --rate 1 --rate 2 --rate 4
    --html load.html`
    """
    state = state_of(context)
    tables = table_paths(table or [], _TABLES)
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
            *(r.echo for r in reports),
        )
        note_jobs([report.job_id for report in reports])
        _write_tables(foretoken, reports[-1], tables)
        if trace is not None:
            _write_serving_trace(foretoken, reports[-1], trace)
        if html is not None:
            _write_page(html, resolved, reports)
        leave_unless(any(report.feasibility.is_feasible for report in reports))


def _write_page(path: Path, scenario: ServingScenario, reports: Sequence[ServingReport]) -> None:
    from foretoken.simulator.report.page import serving_sections

    title = f"{scenario.model.name} on {scenario.device}"
    write_page(path, title, serving_sections(reports))


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


def serving_table(title: str, reports: Sequence[ServingReport]) -> Table:
    """Return the table of one or more serving reports, a column per report, and the remarks."""
    rows: list[list[object]] = [
        ["feasible", *(describe_feasibility(r.feasibility) for r in reports)]
    ]
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
    decoded = [report.tokens_per_decode_mean for report in reports]
    if any(number != 1 for number in decoded):
        rows.append(["tokens of a decoding request in a step", *decoded])
    rows += _pool_rows(reports)
    refused = [sum(report.num_refused_by_reason.values()) for report in reports]
    if any(refused):
        rows.append(["requests not served", *(_refused(report) for report in reports)])
    rows.append(["step time interval", *(_interval(report) for report in reports)])
    rows.append(
        ["rests on", *(describe_shares(report.step_time_ratio_by_provenance) for report in reports)]
    )
    table = build_table(title, headers, rows)
    notes = dict.fromkeys(text for report in reports for text in report.notes)
    return stack(table, *(f"- {text}" for text in notes)) if notes else table


def _pool_rows(reports: Sequence[ServingReport]) -> list[list[object]]:
    """Return a few numbers of each pool of a cluster, and what moves between pools."""
    names = list(dict.fromkeys(pool.name for report in reports for pool in report.pools))
    rows: list[list[object]] = []
    for name in names:
        pools = [
            next((pool for pool in report.pools if pool.name == name), PoolReport(name=name))
            for report in reports
        ]
        for title, field in _POOL_ROWS:
            cells = [getattr(pool, field) for pool in pools]
            if field not in _OPTIONAL_POOL_FIELDS or any(cells):
                rows.append([f"{name}: {title}", *cells])
    if any(report.transfer_ms.max for report in reports):
        rows += [
            [f"KV transfer {statistic} (ms)", *(getattr(r.transfer_ms, statistic) for r in reports)]
            for statistic in ("p50", "p99")
        ]
    if any(report.num_retries for report in reports):
        rows.append(["requests begun anew", *(report.num_retries for report in reports)])
    return rows


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


_POOL_ROWS = (
    ("replicas, mean", "running_engines_mean"),
    ("requests", "num_requests"),
    ("device utilisation (0-1)", "utilization_ratio"),
    ("KV blocks", "num_kv_blocks"),
    ("KV use, mean (0-1)", "kv_utilization_ratio_mean"),
    ("mean batch size", "batch_size_mean"),
    ("failures", "num_failures"),
    ("replicas started", "num_scale_ups"),
    ("replicas given up", "num_scale_downs"),
    ("KV cache moved (bytes/s)", "sent_bytes_per_s"),
    ("ports busy (0-1)", "port_utilization_ratio"),
    ("adapters loaded", "num_adapter_loads"),
)
_OPTIONAL_POOL_FIELDS = frozenset(
    {
        "num_failures",
        "num_scale_ups",
        "num_scale_downs",
        "sent_bytes_per_s",
        "port_utilization_ratio",
        "num_adapter_loads",
    }
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


def _interval(report: ServingReport) -> str:
    return f"{report.step_time_low_ratio:.2f} to {report.step_time_high_ratio:.2f} x"


def _simulate_loads(
    foretoken: "Foretoken", loads: Sequence[tuple[str, ServingScenario]]
) -> Iterator[ServingReport]:
    for title, load in loads:
        with show_progress(title) as update:
            yield foretoken.simulate_serving(load, on_progress=update)


def _write_tables(foretoken: "Foretoken", report: ServingReport, paths: Mapping[str, Path]) -> None:
    for name, path in paths.items():
        write_stream(foretoken.read_serving_table(report, name), path)
        note(f"{name} written to {path}")


def _write_serving_trace(foretoken: "Foretoken", report: ServingReport, path: Path) -> None:
    from foretoken.simulator.report.serving_trace import chrome_trace
    from foretoken.wire.arrow import read_table

    steps, requests = (
        read_table(foretoken.read_serving_table(report, name)) for name in ("steps", "requests")
    )
    path.write_text(json.dumps(chrome_trace(steps, requests)), encoding="utf-8")
    note(f"trace written to {path}; open it in https://ui.perfetto.dev")
