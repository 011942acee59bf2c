"""Single requests of a serving simulation over time: waiting, prompt, transfer and answer."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.results.report import ServingReport
from foretoken.page.block import Column, Table
from foretoken.page.chart import GREEN, GREY, ORANGE, PURPLE, Plot
from foretoken.page.section import Section
from foretoken.simulator.grid import Floats

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
    columns = [
        Column.words("request", "request"),
        Column.words("does", "does"),
        Column(title="from (s)", name="start"),
        Column(title="to (s)", name="end"),
        Column(title="prompt tokens", name="num_prefill_tokens"),
        Column(title="answer tokens", name="num_decode_tokens"),
    ]
    num_all = len(report.requests.arrival_s)
    plot = Plot(
        title="Single requests",
        table=Table(columns=columns, rows=rows),
        x="start",
        y="request",
        by="does",
        colors=_COLORS,
        caption=f"Of {num_all:,} requests those that took longest, and as many spread over the"
        " others, in the order they arrived: on its way to the engine or between pools, waiting,"
        " computing the prompt, answering.",
        is_near=True,
    )
    return [Section(title="Single requests", pictures=[plot.spans("end")])]


def _choose(report: ServingReport) -> NDArray[np.int64]:
    """Return places of requests by arrival: half took longest, half are spread over the others."""
    took_s = _column(report, "finished_s") - _column(report, "arrival_s")
    finished = np.flatnonzero(_column(report, "finished_s") >= 0)
    by_time = finished[np.argsort(-took_s[finished], kind="stable")]
    slowest, others = by_time[: _SHOWN // 2], np.sort(by_time[_SHOWN // 2 :])
    spread = np.linspace(0, len(others) - 1, min(_SHOWN // 2, len(others)))
    return np.sort(np.concatenate([slowest, others[spread.astype(np.int64)]]))


def _spans(report: ServingReport, place: int) -> Iterator[tuple[str, str, float, float, int, int]]:
    """Yield what a request did from when to when; what took no time is left out."""
    arrival, queued, scheduled, first, finished, transferred, prompt, answer = (
        float(_column(report, name)[place]) if len(_column(report, name)) else -1.0
        for name in (
            "arrival_s",
            "queued_s",
            "scheduled_s",
            "first_token_s",
            "finished_s",
            "transferred_s",
            "num_prefill_tokens",
            "num_decode_tokens",
        )
    )
    parts = [
        ("on its way", arrival, queued),
        ("waits", queued, scheduled),
        ("prompt", scheduled, first),
        ("on its way", first, transferred),
        ("answer", max(first, transferred), finished),
    ]
    for name, start, end in parts:
        if end > start >= 0:
            yield f"request {place + 1}", name, start, end, int(prompt), int(answer)


def _column(report: ServingReport, name: str) -> Floats:
    return np.asarray(getattr(report.requests, name), dtype=np.float64)
