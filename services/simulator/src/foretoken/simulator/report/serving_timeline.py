"""Serving runs over time: what happens in every interval, and single requests."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.metrics.metric import SHARE
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS
from foretoken.domain.metrics.serving import describe_load
from foretoken.domain.results.report import ServingReport
from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import BLUE, GREEN, GREY, ORANGE, PURPLE, SERIES, SKY, VERMILION, Plot
from foretoken.page.curve import Curve, draw_curves, draw_spans
from foretoken.page.section import Section
from foretoken.simulator.grid import Floats

Reports = Mapping[str, ServingReport]

# Pictures of more intervals, of all runs together, show no more and make the page large.
_MAX_INTERVALS = 600
# What the last digits of sums of seconds may add.
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class _Track:
    """Columns of a series over time: (label, column, colour); a rate is of what is counted.

    A track is there if it is seen of one run.
    """

    title: str
    lines: Sequence[tuple[str, str, str]]
    unit: str = ""
    is_rate: bool = False
    is_seen: Callable[[ServingReport], bool] = lambda _: True


_TRACKS = (
    _Track(
        title="requests/s",
        lines=[("arrived", "num_arrivals", GREY), ("completed", "num_completions", BLUE)],
        is_rate=True,
    ),
    _Track(
        title="requests",
        lines=[("running", "running_mean", GREEN), ("waiting", "waiting_mean", VERMILION)],
    ),
    _Track(
        title="tokens/s",
        lines=[("prompt", "num_prefill_tokens", ORANGE), ("output", "num_output_tokens", BLUE)],
        is_rate=True,
    ),
    _Track(title="batch size", lines=[("", "batch_size_mean", SKY)]),
    *(
        _Track(title=METRICS[name].label, lines=[("", name, color)], unit=SHARE)
        for name, color in (("kv_utilization_ratio", PURPLE), ("utilization_ratio", GREEN))
    ),
    _Track(
        title="replicas",
        lines=[("", "replicas_mean", BLUE)],
        is_seen=lambda report: bool(np.ptp(report.series.replicas_mean) > 0),
    ),
    _Track(
        title="power (W)",
        lines=[("", "power_w", ORANGE)],
        is_seen=lambda report: report.power_w_mean > 0,
    ),
)


def timeline(reports: Reports) -> Section:
    """Return a run second by second, or several in common intervals, a line for each."""
    # Intervals that all runs can be drawn in are a multiple of the widest.
    widest_s = max(_width_s(report) for report in reports.values())
    end_s = max(float(r.series.start_s[-1]) + _width_s(r) for r in reports.values())
    most = _MAX_INTERVALS // len(reports)
    width_s = widest_s * max(ceil(end_s / (widest_s * most) - _ROUNDING), 1)
    edges = np.arange(0.0, end_s + width_s, width_s)
    tracks = [track for track in _TRACKS if any(map(track.is_seen, reports.values()))]
    if len(reports) > 1:
        what, more = "All replicas together.", " A curve ends with its run."
        colors = dict(zip(reports, SERIES, strict=False))
        # A chart for each line of a track, with all runs in it.
        charts = [
            _draw(
                track,
                f"{line} {track.title}".strip(),
                [(label, report, column, colors[label]) for label, report in reports.items()],
                edges,
            )
            for track in tracks
            for line, column, _ in track.lines
        ]
    else:
        (report,) = reports.values()
        what, more = f"At {describe_load(report)}.", ""
        charts = []
        for track in tracks:
            lines = [(label, report, column, color) for label, column, color in track.lines]
            charts.append(_draw(track, track.title, lines, edges))
    intro = (
        f"{what} Every step of a curve is {format_number(width_s)} s: sums of what happened in it,"
        f" means of what stood. Requests and blocks are those of all replicas.{more}"
    )
    return Section(title="Over time", intro=intro, pictures=charts)


def _draw(
    track: _Track, title: str, lines: Iterable[tuple[str, ServingReport, str, str]], edges: Floats
) -> Chart:
    """Return a chart of lines: their names, runs, columns and colours."""
    curves, per_s = [], float(edges[1] - edges[0]) if track.is_rate else 1.0
    for label, report, column, color in lines:
        values = resample(report, column, edges) / per_s
        # A curve ends with its run; the last interval is drawn to its end.
        kept = values[np.isfinite(values)].tolist()
        x = edges[: len(kept) + 1].tolist()
        curves.append(Curve(label=label, x=x, y=[*kept, kept[-1]], color=color))
    time_s = Column(title="time (s)", name="time_s")
    value = Column(title=title, name="value", unit=track.unit)
    return draw_curves(Plot(title=title, height=120), curves, x=time_s, y=value, is_step=True)


def _width_s(report: ServingReport) -> float:
    starts = report.series.start_s
    return float(starts[1] - starts[0]) if len(starts) > 1 else 1.0


def resample(report: ServingReport, column: str, edges: Floats) -> Floats:
    """Return sums of a count, means of what else a column has, between edges; NaN after the run.

    An interval of the run counts where its middle is. Where a run ends between two edges its
    counts are those of so much time as the others have.
    """
    starts = np.asarray(report.series.start_s, dtype=np.float64)
    values = np.asarray(getattr(report.series, column), dtype=np.float64)
    middles = starts + _width_s(report) / 2
    places = np.searchsorted(edges, middles, side="right") - 1
    num_bins = len(edges) - 1
    sums = np.bincount(places, weights=values, minlength=num_bins)
    counts = np.bincount(places, minlength=num_bins)
    means = sums / np.maximum(counts, 1)
    per_bin = np.round((edges[1] - edges[0]) / _width_s(report))
    scaled = means * per_bin if column.startswith("num_") else means
    return np.where(counts > 0, scaled, np.nan)


# More rows cannot be distinguished in a picture.
_SHOWN: Final = 40
_COLORS: Final = {
    "on its way": PURPLE,
    "waits": GREY,
    "prompt": ORANGE,
    "answer": GREEN,
}


def waterfall(report: ServingReport) -> list[Section]:
    """Return some requests as bars of what each did when; nothing without requests."""
    chosen = _choose(report)
    rows = [row for place in chosen for row in _spans(report, int(place))]
    if not rows:
        return []
    columns = (
        *(Column.words("request"), Column.words("does")),
        *(Column(title="time (s)", name="start"), Column(title="until (s)", name="end")),
        Column(title="prompt tokens", name="num_prefill_tokens"),
        Column(title="answer tokens", name="num_decode_tokens"),
    )
    num_all = len(report.requests.arrival_s)
    plot = Plot(
        title="Single requests",
        colors=_COLORS,
        caption=f"Of {num_all:,} requests those that took longest, and as many spread over the"
        " others, in the order they arrived: on its way to the engine or between pools, waiting,"
        " computing the prompt, answering.",
        is_near=True,
    )
    chart = draw_spans(plot, Table(columns=columns, rows=rows))
    return [Section(title=plot.title, pictures=[chart])]


def _choose(report: ServingReport) -> NDArray[np.int64]:
    """Return places of requests by arrival: half took longest, half are spread over the others."""
    end_s, start_s = np.asarray(report.requests.finished_s), np.asarray(report.requests.arrival_s)
    took_s, finished = end_s - start_s, np.flatnonzero(end_s >= 0)
    by_time = finished[np.argsort(-took_s[finished], kind="stable")]
    slowest, others = by_time[: _SHOWN // 2], np.sort(by_time[_SHOWN // 2 :])
    spread = np.linspace(0, len(others) - 1, min(_SHOWN // 2, len(others)))
    return np.sort(np.concatenate([slowest, others[spread.astype(np.int64)]]))


def _spans(report: ServingReport, place: int) -> Iterator[tuple[str, str, float, float, int, int]]:
    """Yield what a request did from when to when; what took no time is left out."""
    columns = report.requests
    arrival, queued, scheduled, prefilled, finished, transferred, prompt, answer = (
        float(column[place]) if len(column) else -1.0
        for column in (
            *(columns.arrival_s, columns.queued_s, columns.scheduled_s, columns.prompt_end_s),
            *(columns.finished_s, columns.transferred_s),
            *(columns.num_prefill_tokens, columns.num_decode_tokens),
        )
    )
    parts = [
        ("on its way", arrival, queued),
        ("waits", queued, scheduled),
        ("prompt", scheduled, prefilled),
        ("on its way", prefilled, transferred),
        ("answer", max(prefilled, transferred), finished),
    ]
    for name, start, end in parts:
        if end > start >= 0:
            yield f"request {place + 1}", name, start, end, int(prompt), int(answer)
