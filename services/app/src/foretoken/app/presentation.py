"""Results as lines, tables and pages: what the methods of `ResultMethods` answer.

What draws pages, and the wire's tables, are imported when one is asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import LatencyColumns, LatencyEstimate
from foretoken.domain.measurements.surface import LatencySurface
from foretoken.domain.requests.training_run import TrainingMemoryReport
from foretoken.domain.results.methods import ResultMethods
from foretoken.domain.results.report import PredictorTrainingReport
from foretoken.domain.results.result import REPORT_CLASSES

if TYPE_CHECKING:
    import pyarrow as pa

# The table of what is one value each.
SUMMARY = "summary"
# Reports that the catalog keeps, which have a title and a figure that sums them up.
_KEPT = tuple(REPORT_CLASSES.values())
_NUM_SHOWN = 3


def describe(result: ResultMethods) -> str:
    """Return what a result is of and what sums it up, on one line."""
    if isinstance(result, _KEPT):
        from foretoken.simulator.results import name_result, sum_up

        return f"{name_result(result)}: {sum_up(result)}"
    if isinstance(result, LatencyEstimate):
        bounds = f"{result.low_us:.4g} to {result.high_us:.4g}"
        return f"{result.latency_us:.4g} µs ({bounds}), {result.provenance.name.lower()}"
    figures = list(_flatten(schema.encode(result)))
    first = ", ".join(f"{name} {_show(value)}" for name, value in figures[:_NUM_SHOWN])
    return first or ", ".join(f"{len(rows)} {name}" for name, rows in _lists(result).items())


def render_figures(result: ResultMethods) -> str:
    """Return the figures of a result as an HTML table, and what they rest on below it."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(label)}</th>"
        f"<td style='text-align:right'>{escape(text)}</td></tr>"
        for label, text in _list_figures(result)
    )
    echo = getattr(result, "echo", None)
    lines = "".join(f"<div>{escape(line)}</div>" for line in (echo.lines() if echo else ()))
    return f"<table><caption>{escape(describe(result))}</caption>{rows}</table>{lines}"


def build_table(result: ResultMethods, table: str = "") -> "pa.Table":
    """Return a table of a result by its name, as `ResultMethods.to_arrow` does."""
    import pyarrow as pa

    from foretoken.wire.ipc import record_to_table
    from foretoken.wire.result_file import table_fields

    if isinstance(result, LatencySurface):
        columns = {"surface": _spread(result)}
    else:
        columns = {
            name: record_to_table(getattr(result, field))
            for name, field in table_fields(type(result)).items()
        }
    lists = _lists(result)
    names = [*columns, SUMMARY, *lists]
    wanted = table or names[0]
    if wanted in columns:
        return columns[wanted]
    if wanted == SUMMARY:
        return pa.Table.from_pylist([dict(_flatten(result.to_dict()))])
    if wanted in lists:
        return pa.Table.from_pylist(schema.encode(lists[wanted]))
    raise InvalidRequestError.of_field("table", f"{wanted!r} is not one of {', '.join(names)}")


def render_page(result: ResultMethods) -> str:
    """Return the page of a result."""
    if isinstance(result, _KEPT):
        from foretoken.simulator.report import page
        from foretoken.simulator.results import name_result

        return page.render_page(name_result(result), page.result_sections(result))
    if isinstance(result, TrainingMemoryReport):
        from foretoken.simulator.report.memory_sections import render_memory

        return render_memory("Memory of a training step", result)
    if isinstance(result, PredictorTrainingReport):
        from foretoken.predictor.report.page import render_page as render_training

        return render_training(result)
    from foretoken.page.block import Table
    from foretoken.page.html import render_sections
    from foretoken.page.section import Section

    table = Table.listed(headers=("figure", "value"), rows=_list_figures(result))
    sections = [Section(title="Figures", table=table)]
    return render_sections(type(result).__name__, describe(result), sections)


def _list_figures(result: ResultMethods) -> Sequence[tuple[str, str]]:
    """Return the labels and texts of what a reader wants to see of a result."""
    if isinstance(result, _KEPT):
        from foretoken.simulator.comparison import compare_figures

        return [(figure.title, figure.texts()[0]) for figure in compare_figures([result])]
    return [(name, _show(value)) for name, value in _flatten(schema.encode(result))]


def _lists(result: ResultMethods) -> Mapping[str, Sequence[Any]]:
    """Return the fields of a result that hold records, by their names."""
    found = {item.name: getattr(result, item.name) for item in fields(result)}  # type: ignore[arg-type]
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, tuple) and value and all(map(is_dataclass, value))
    }


def _flatten(content: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the single values in plain data with their paths; no lists, and no other documents."""
    for key, value in content.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        elif not isinstance(value, list) and not name.endswith("_json"):
            yield name, value


def _spread(surface: LatencySurface) -> "pa.Table":
    """Return a surface as a table: a row for each point, its dimensions first."""
    from itertools import product

    import pyarrow as pa

    points = list(product(*(axis.values for axis in surface.axes)))
    dims = {axis.dim: [point[n] for point in points] for n, axis in enumerate(surface.axes)}
    columns: LatencyColumns = surface.estimates
    times = {name: getattr(columns, name) for name in ("latency_us", "low_us", "high_us")}
    return pa.table({**dims, **times})


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
