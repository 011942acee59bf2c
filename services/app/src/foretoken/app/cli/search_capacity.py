"""`foretoken search capacity`: the highest rate at which a deployment meets its targets."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from foretoken.app.cli.output_file import page_option, write_page
from foretoken.app.cli.request_options import Answers, OptionsOf, with_option_groups
from foretoken.app.cli.state import (
    build_table,
    leave_unless,
    open_services,
    scenario_changes,
    show_progress,
    stack,
)
from foretoken.app.scenario_file import read_serving_scenario
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.metrics.registry import ATTAINMENT, METRICS, describe_limit
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import (
    CapacityProbe,
    CapacityReport,
    CapacityRequest,
    LimitOutcome,
)
from foretoken.domain.results.report import RequestColumns, SeriesColumns, ServingReport


@with_option_groups
def capacity(
    context: typer.Context,
    answers: Annotated[Answers, OptionsOf(CapacityRequest)],
    scenario: Annotated[Path, typer.Argument(help="Scenario file (YAML).")],
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one key of the scenario: `layout.tp=2`. Repeatable."),
    ] = None,
    out: Annotated[Path | None, page_option("--out")] = None,
) -> None:
    """Find the highest request rate at which a deployment meets all its targets.

    The same requests arrive closer together or further apart, every rate simulated request by
    request, until the answer is bracketed. Its interval says how much other requests of the kind,
    and the predictor's error, could move it. Closed loops have no rate and are refused. The exit
    status is 3 where no rate meets the targets.

    - `foretoken search capacity docs/examples/serving.yaml --limit "ttft p99 2s" --limit "itl p99
    200ms"`

    - 99 % of requests in the scenario's SLO: `... --set slo.ttft_ms=1000 --attainment 0.99`
    """
    with open_services(context) as (state, services):
        resolved = read_serving_scenario(scenario, scenario_changes(change))
        request = _build_request(resolved, answers)
        foretoken = services.foretoken("simulator")
        with show_progress("search") as update:
            report = foretoken.find_capacity(request, on_progress=update)
        title = f"{resolved.model.name} on {report.num_devices} {resolved.device}"
        state.print_object(
            _without_columns(report),
            lambda: capacity_table(title, report, request.confidence_ratio),
            report.echo,
        )
        if out is not None:
            from foretoken.simulator.report.page import result_sections

            write_page(out, title, result_sections(report))
        leave_unless(report.feasibility.is_feasible and report.capacity_rps > 0)


def _build_request(scenario: ServingScenario, answers: Answers) -> CapacityRequest:
    asked = answers.read()
    targets = asked.setdefault("targets", {})
    if not any(targets.values()):
        raise InvalidRequestError.of_field(
            "--limit", 'give at least one, such as --limit "ttft p99 2s", or --attainment 0.99'
        )
    return schema.decode(CapacityRequest, {"scenario": scenario, **asked})


def capacity_table(title: str, report: CapacityReport, confidence_ratio: float = 0.0) -> Table:
    """Return the runs of a search, the rate it found, how sure it is and what limits it.

    A confidence of 0 is one that is not known.
    """
    parts: list[Table | str] = []
    if report.probes:
        parts += [_probe_table(title, report.probes), ""]
    if not report.feasibility.is_feasible:
        return stack(*parts, f"no rate: {report.feasibility.reason}")
    notes = [f"note: {text}" for text in report.notes]
    return stack(*parts, _answer_table(report, confidence_ratio), *notes)


def _probe_table(title: str, probes: tuple[CapacityProbe, ...]) -> Table:
    """Return a row for every rate that was run, by rate."""
    names = [_name(outcome) for outcome in probes[0].outcomes]
    rows = [
        (
            f"{probe.rate_rps:.4g}",
            "met" if probe.is_met else "missed",
            *(_cell(outcome, is_lower=probe.is_cut_short) for outcome in probe.outcomes),
            f"first {probe.num_requests:,}" if probe.is_cut_short else f"{probe.num_requests:,}",
        )
        for probe in sorted(probes, key=lambda probe: probe.rate_rps)
    ]
    return build_table(title, ("requests/s", "targets", *names, "requests run"), rows)


def _answer_table(report: CapacityReport, confidence_ratio: float) -> Table:
    at_capacity = report.at_capacity
    rows: list[tuple[str, object]] = [_row("capacity_rps", report)]
    if report.first_miss_rps:
        percent = f"{confidence_ratio:.0%} ".replace("%", " %") if confidence_ratio else ""
        rows += [
            ("  missed at", report.first_miss_rps),
            (f"  {percent}interval", _interval(report.low_rps, report.high_rps)),
            (
                "  of that by other requests alone",
                _interval(report.sampling_low_rps, report.sampling_high_rps),
            ),
        ]
    rows += [
        ("limited by", report.limiting or "nothing, up to the highest rate that was tried"),
        *(_row(name, report) for name in ("capacity_rps_per_gpu", "num_devices")),
        *(_row(name, at_capacity) for name in ("output_throughput_tps", "utilization_ratio")),
    ]
    if report.usd_per_million_output_tokens:
        rows.append(_row("usd_per_million_output_tokens", report))
    rows.append(("CPU time (s)", report.cpu_s))
    return build_table("", ("answer", ""), rows)


def _row(name: str, report: CapacityReport | ServingReport) -> tuple[str, object]:
    metric = METRICS[name]
    return metric.title, metric.text(metric.value(report), digits=4, decimals=1)


def _interval(low: float, high: float) -> str:
    return f"{low:.4g} to {high:.4g}"


def _name(outcome: LimitOutcome) -> str:
    if outcome.metric == ATTAINMENT:
        return f"{METRICS['slo_attainment_ratio'].label} (at least {outcome.limit:.1%})"
    named = describe_limit(outcome.metric, outcome.percentile)
    return f"{named} (ms, at most {outcome.limit:g})"


def _cell(outcome: LimitOutcome, *, is_lower: bool) -> str:
    """Return a figure; of a run that was cut short it is the best it could become."""
    if outcome.metric == ATTAINMENT:
        return f"{'<= ' * is_lower}{outcome.value:.2%}"
    return f"{'>= ' * is_lower}{outcome.value:.4g}"


def _without_columns(report: CapacityReport) -> CapacityReport:
    """Return a report without the requests and the series of its run, which are long."""
    plain = replace(report.at_capacity, requests=RequestColumns(), series=SeriesColumns())
    return replace(report, at_capacity=plain)
