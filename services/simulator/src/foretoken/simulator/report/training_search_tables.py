"""The tables of a training search: its ranking, the best by each measure, what is ruled out."""

from collections.abc import Sequence
from operator import attrgetter

from foretoken.domain.metrics.number_text import describe_step
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.requests.training_search import TrainingSearchReport
from foretoken.page.block import Column, Table
from foretoken.simulator.report.search_candidates import PLACE, Row, bound_columns
from foretoken.simulator.report.training_search_rows import (
    best_by_objective,
    describe_devices,
    describe_same,
    describe_verdict,
    make_whole_run,
    read_sequence_length,
    throughput_bounds,
)

_THROUGHPUT, _COST = "tokens_per_s_per_gpu", "usd_per_billion_tokens"
_RATIOS = ("mfu_ratio", "bubble_ratio")
NAME = Column.words("strategy", "name")
_STEP = Column(
    title=METRICS["step_time_ms"].label,
    name="step_time_ms",
    read=lambda item: describe_step(METRICS["step_time_ms"].value(item)),
)
OF_CHANGES = (
    Column(title="today's best", read=describe_same),
    Column.of(_THROUGHPUT),
    _STEP,
    Column(title="fit", name="num_fitting"),
)


def _figures(rows: Sequence[Row], *, is_whole: bool = True) -> list[Column]:
    """Return the columns; the device, its number and the price only where they tell rows apart.

    Bounds and ratios only if `is_whole`.
    """
    columns: list[Column] = []
    if len({(row["device"], row["num_devices"]) for row in rows}) > 1:
        # Names of placements say the devices.
        title = METRICS["num_devices"].title
        columns.append(Column(title=title, name="devices", read=_describe_num_devices))
    columns.append(Column.of(_THROUGHPUT))
    if is_whole:
        columns += bound_columns(_THROUGHPUT, throughput_bounds)
    names = ("step_time_ms", *(_RATIOS if is_whole else ()), "margin_bytes")
    columns += [Column.of(name) for name in names]
    if any(row[_COST] > 0 for row in rows):
        columns.append(Column.of(_COST))
    return columns


def _describe_num_devices(row: Row) -> str:
    return f"{row['num_devices']:,}" if row["placement"] else describe_devices(row)


def ruled_out_table(report: TrainingSearchReport) -> Table:
    """Return what rules strategies out, by how many it does."""
    ordered = sorted(report.ruled_out, key=lambda item: -item.num_strategies)
    return Table.of(
        ordered,
        Column.words("ruled out", read=lambda item: describe_verdict(item.verdict)),
        Column(title="strategies", name="num_strategies"),
        Column.words("for example", "example"),
        Column.words("because", "reason"),
    )


def ranking_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns of a ranking."""
    return [NAME, PLACE, *_figures(rows)]


def best_table(report: TrainingSearchReport, rows: Sequence[Row], num_tokens: float = 0.0) -> Table:
    """Return the best by each measure, with what a run to `num_tokens` takes if there are any."""
    found = best_by_objective(report, rows)
    measures = {row["name"]: words for words, row in found}
    best_by = Column.words("best by", read=lambda row: measures[row["name"]])
    columns = [NAME, best_by, *_figures(rows, is_whole=False)]
    if num_tokens > 0:
        columns += _run_columns(rows, num_tokens, read_sequence_length(report))
    return Table.of([row for _, row in found], *columns)


def _run_columns(rows: Sequence[Row], num_tokens: float, length: int) -> list[Column]:
    titles = {"num_steps": "steps", "days": "days"}
    if any(row["usd_per_step"] > 0 for row in rows):
        titles["usd"] = "USD in all"

    def column(name: str) -> Column:
        figure = attrgetter(name)
        return Column(
            title=titles[name],
            name=name,
            read=lambda row: figure(make_whole_run(row, num_tokens, length)),
        )

    return [column(name) for name in titles]
