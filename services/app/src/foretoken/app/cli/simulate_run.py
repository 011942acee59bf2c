"""`foretoken simulate run`: what a whole training run takes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from foretoken.app.cli.output_file import page_option, write_page
from foretoken.app.cli.request_options import Answers, OptionsOf, with_option_groups
from foretoken.app.cli.state import (
    build_table,
    describe_feasibility,
    format_cell,
    leave_unless,
    note_jobs,
    open_services,
    scenario_changes,
    show_progress,
    stack,
)
from foretoken.app.scenario_file import build_training_scenario
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.price import load_price_list
from foretoken.domain.metrics.metric import title_of
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.plugins import read_yaml
from foretoken.domain.requests.training_run import TrainingRunReport, TrainingRunRequest
from foretoken.domain.units import MS_PER_S

_GIGA = 1e9
_KWH_PER_MWH = 1e3
_S_PER_MINUTE = 60.0
# What a reason of memory says after what is lacking.
_ADVICE = "; "
_STEP_TIME = title_of(METRICS["step_time_ms"].label, "s")
_WITH_MEMORY = f"{_STEP_TIME}, were there more memory"
# Keys of `--set` that are of the run and not of the scenario.
_SECTIONS = ("failures", "sites", "prices")


@with_option_groups
def run(
    context: typer.Context,
    scenario: Annotated[
        Path,
        typer.Argument(
            help="Scenario file (YAML) of one step, or a whole request as a report has it:"
            " `scenario`, `num_tokens`, `failures`, `sites`, `prices`."
        ),
    ],
    answers: Annotated[Answers, OptionsOf(TrainingRunRequest, partial=("",))],
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change one key of the scenario (`layout.pp=4`), or of `failures`, `sites` and"
            " `prices`: `failures.device_mtbf_hours=50000`. Repeatable.",
        ),
    ] = None,
    html: Annotated[Path | None, page_option("--html")] = None,
) -> None:
    """Plan a whole training run: days, money and energy, with failures and checkpoints.

    One step is simulated; a run is its tokens over the batch. Nothing is said of the loss. With
    `failures.device_mtbf_hours` machines fail, and the interval of checkpoints that loses least is
    found, unless `failures.checkpoint_interval_s` gives one. `sites.num_sites` clusters train
    together over `sites.bytes_per_s`, and sum every `sites.sync_steps` steps. All keys are in
    docs/reference/training-runs.md. The exit status is 3 where the run does not fit, or no number
    of devices that was tried meets the target date.

    Example: `foretoken simulate run docs/examples/training.yaml --tokens 1e12 --price-list lambda
    --set failures.device_mtbf_hours=50000 --target-days 90 --page run.html`
    """
    with open_services(context) as (state, services):
        request = build_request(scenario, scenario_changes(change), answers)
        foretoken = services.foretoken("simulator")
        with show_progress("plan the run"):
            report = foretoken.plan_training_run(request)
        state.print_object(report, lambda: run_table(request, report), report.echo)
        if report.job_id:
            note_jobs((report.job_id,))
        if html is not None:
            from foretoken.simulator.report.page import result_sections

            write_page(html, _title(request, report), result_sections(report))
        is_in_time = not request.target_days or report.target_devices > 0
        leave_unless(report.feasibility.is_feasible and is_in_time)


def _title(request: TrainingRunRequest, report: TrainingRunReport) -> str:
    scenario = request.scenario
    devices = " and ".join(dict.fromkeys(scenario.stage_devices or (scenario.device,)))
    tokens = _describe_tokens(report.num_tokens)
    return f"{scenario.model.name}, {tokens} tokens on {report.num_devices:,} {devices}"


def _describe_tokens(num_tokens: float) -> str:
    """Return a number of tokens as people say it: `627 billion`."""
    return f"{num_tokens / _GIGA:,.6g} billion" if num_tokens >= _GIGA else f"{num_tokens:,.0f}"


def run_table(request: TrainingRunRequest, report: TrainingRunReport) -> Table:
    """Return a run for a terminal: what it takes, where its time goes, sizes, remarks."""
    rows = [("feasible", describe_feasibility(report.feasibility)), *_length_rows(request, report)]
    if report.days > 0:
        rows += [*_time_rows(report), *_money_rows(report)]
    parts: list[Table | str] = [build_table(_title(request, report), ("", "value"), rows)]
    if report.days > 0:
        parts.append(_share_table(report))
    if report.sizes:
        parts.append(_size_table(request, report))
    if report.notes:
        parts.append("\n" + "\n".join(f"- {text}" for text in report.notes))
    return stack(*parts)


def _length_rows(
    request: TrainingRunRequest, report: TrainingRunReport
) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [
        ("tokens", _describe_tokens(report.num_tokens)),
        ("steps", round(report.num_steps)),
        _row("num_devices", report),
        (_STEP_TIME, report.step_time_ms / MS_PER_S),
    ]
    if not report.feasibility.is_feasible and report.step_time_ms > 0:
        # No days of what cannot run.
        rows[-1] = (_WITH_MEMORY, report.step_time_ms / MS_PER_S)
    elif report.step_time_ms > 0:
        # Each site has a batch of its own.
        tokens = request.scenario.global_batch_size * request.scenario.sequence_length
        of_device = tokens * request.sites.num_sites / report.num_devices
        rows.append(
            (
                f"{METRICS['tokens_per_s_per_gpu'].title}, in a step",
                of_device * MS_PER_S / report.step_time_ms,
            )
        )
    return rows


def _time_rows(report: TrainingRunReport) -> list[tuple[str, object]]:
    spread = report.days_spread
    written = f"{format_cell(report.checkpoint_s)} s"
    rows: list[tuple[str, object]] = [
        _row("ideal_days", report),
        _row("days", report),
        (
            "  90 % interval",
            f"{format_cell(report.days_low)} to {format_cell(report.days_high)}",
        ),
    ]
    if report.num_failures:
        quantiles = (format_cell(value) for value in (spread.p50, spread.p90, spread.p99))
        rows += [
            ("  by chance, p50 / p90 / p99", " / ".join(quantiles)),
            _row("num_failures", report),
            ("a checkpoint every (min)", report.checkpoint_interval_s / _S_PER_MINUTE),
            ("checkpoint", f"{format_cell(report.checkpoint_bytes / _GIGA)} GB in {written}"),
        ]
    return rows


def _money_rows(report: TrainingRunReport) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [_row("device_hours", report)]
    if report.usd:
        rows.append((METRICS["usd"].title, _dollars(report.usd)))
        rows.append(_row("usd_per_step", report))
    if report.usd_per_hour:
        rows.append(_row("usd_per_hour", report))
        rows.append(("  source", report.price_source))
    rows.append(("energy (MWh)", report.energy_kwh / _KWH_PER_MWH))
    if report.energy_usd:
        rows.append(("  of the cost (USD)", _dollars(report.energy_usd)))
    return rows


def _share_table(report: TrainingRunReport) -> Table:
    rows = [
        (name, ratio * report.days, f"{ratio:.2%}")
        for name, ratio in (
            ("new steps (goodput)", report.goodput_ratio),
            ("waiting for checkpoints", report.checkpoint_ratio),
            ("steps done again", report.repeated_ratio),
            ("restarts", report.restart_ratio),
            ("waiting for other sites", report.sites_ratio),
        )
        if ratio > 0
    ]
    return build_table("Where the days go", ("", "days", "share"), rows)


def _size_table(request: TrainingRunRequest, report: TrainingRunReport) -> Table:
    title = "The same batch on other numbers of devices"
    if request.target_days:
        fewest = report.target_devices
        found = f"{fewest:,} devices are the fewest" if fewest else "no number of devices is enough"
        title = f"To be done in {request.target_days:g} days: {found}"
    rows: list[tuple[str, ...]] = [
        (
            f"{size.num_devices:,}",
            str(size.dp),
            size.reason.partition(_ADVICE)[0] or format_cell(size.days),
            f"{size.goodput_ratio:.1%}" if size.days else "-",
            _dollars(size.usd) if size.usd else "-",
            "yes" if size.is_enough else "",
        )
        for size in report.sizes
    ]
    columns: tuple[str, ...] = (
        *(METRICS["num_devices"].label, "dp", "days", METRICS["goodput_ratio"].label),
        *("USD", "in time"),
    )
    if not request.target_days:
        rows, columns = [row[:-1] for row in rows], columns[:-1]
    return build_table(title, columns, rows)


def _row(name: str, report: TrainingRunReport) -> tuple[str, object]:
    return METRICS[name].title, METRICS[name].cell(report)


def _dollars(usd: float) -> str:
    return f"{usd:,.0f}"


def build_request(path: Path, changes: Mapping[str, Any], answers: Answers) -> TrainingRunRequest:
    """Return the request of a file, with what options and changes say instead.

    The file is a scenario, or a request with the key `scenario`: a scenario or its path.

    Raises:
        InvalidRequestError: an unknown key or a wrong value, with its place.

    """
    content, scenario, scenario_path = _read(path)
    of_scenario = {}
    for dotted, value in changes.items():
        if dotted.partition(".")[0] in _SECTIONS:
            schema.set_key(content, dotted, value)
        else:
            of_scenario[dotted] = value
    asked = answers.read()
    _set_length(content, asked)
    prices = asked.pop("prices", {})
    if "price_list" in prices:
        prices["own_list"] = schema.encode(load_price_list(prices.pop("price_list")))
    for name, value in prices.items():
        schema.set_key(content, f"prices.{name}", value)
    content.update(asked)
    built = build_training_scenario(scenario, of_scenario, scenario_path)
    return schema.decode(TrainingRunRequest, {**content, "scenario": schema.encode(built)})


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """Return a request without its scenario, the scenario, and the file that it is in."""
    content = read_yaml(path, "scenario")
    if "scenario" not in content:
        return {}, content, path
    scenario = content.pop("scenario")
    if isinstance(scenario, str):
        in_folder = path.parent / scenario
        return content, read_yaml(in_folder, "scenario"), in_folder
    return content, dict(scenario), path


def _set_length(content: dict[str, Any], asked: Mapping[str, Any]) -> None:
    """Check the length: options name tokens or a dataset, and stand for either of the file's."""
    if "num_tokens" in asked or "dataset" in asked:
        content.pop("num_tokens", None)
        content.pop("dataset", None)
    if asked.get("num_tokens", 1) <= 0:
        raise InvalidRequestError.of_field("--tokens", "must be positive, as in --tokens 1e12")
    said = {**content, **asked}
    if bool(said.get("num_tokens")) == bool(said.get("dataset")):
        raise InvalidRequestError.of_field(
            "--tokens, --dataset",
            "say how much is trained, by one of them: --tokens 1e12, or --dataset slimpajama",
        )
