"""The sections of a serving page about the pools of a cluster and their replicas."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle

import numpy as np

from foretoken.domain.metrics.metric import SHARE
from foretoken.domain.metrics.number_text import format_number
from foretoken.domain.metrics.registry import METRICS, list_figures
from foretoken.domain.results.report import (
    ITL_QUANTILES,
    REPLICA_STATES,
    EngineReport,
    ServingReport,
)
from foretoken.domain.units import MS_PER_S
from foretoken.page.block import Column, Table
from foretoken.page.chart import BLUE, GREEN, GREY, ORANGE, PURPLE, SERIES, SKY, VERMILION, Plot
from foretoken.page.curve import Curve, draw_curves, draw_spans
from foretoken.page.section import Section

_OF_STATE = dict(zip(REPLICA_STATES, (SKY, GREEN, VERMILION), strict=True))


def cluster_sections(report: ServingReport, load: str) -> list[Section]:
    """Return what a page says of the pools of a run; nothing where there is no cluster."""
    if not report.pools:
        return []
    sections = [_pools(report, load)]
    # Of replicas that only ran there is nothing to see.
    if any([phase.state for phase in engine.phases] != ["running"] for engine in report.engines):
        sections.append(_life(report))
    if len(report.engines) > 1:
        sections.append(_loads(report))
    if any(pool.role == "prefill" for pool in report.pools):
        sections.append(_transfers(report))
    return sections


def _pools(report: ServingReport, load: str) -> Section:
    rows = [
        ("role", *(pool.role for pool in report.pools)),
        ("device", *(pool.device for pool in report.pools)),
        *((figure.title, *figure.texts()) for figure in list_figures("pool", report.pools)),
    ]
    retries = f" Requests began anew {report.num_retries:,} times." if report.num_retries else ""
    return Section(
        title="Pools",
        intro=(
            f"At {load}. Utilization, MFU, MBU and KV cache usage are of the time that devices "
            "were held, which is what they cost: starting and restarting count. A request that is "
            f"prefilled in one pool and decoded in another counts in both.{retries}"
        ),
        table=Table.listed(headers=("pool", *(pool.name for pool in report.pools)), rows=rows),
    )


def _life(report: ServingReport) -> Section:
    phases = [(engine, phase) for engine in report.engines for phase in engine.phases]
    table = Table.of(
        phases,
        Column.words("replica", read=lambda of: f"{of[0].pool} {of[0].engine}".strip()),
        Column(title="time (s)", name="start_s").part(1),
        Column(title="until (s)", name="end_s").part(1),
        Column.words("state").part(1),
    )
    plot = Plot(
        title="Replicas over time",
        colors=_OF_STATE,
        caption=(
            "When the devices of each replica were held and what for. A restart begins with a"
            " failure; where nothing is drawn nothing is held."
        ),
    )
    return Section(title="Replicas", pictures=[draw_spans(plot, table)])


def _loads(report: ServingReport) -> Section:
    """Return the load of every replica, in the colour of its pool."""
    num_requests = max(report.num_requests, 1)
    caption = (
        "Bars of one pool that differ much mean that its router spreads requests unevenly, or that"
        " some replicas ran for a part of the time. Utilization is that of the busiest stage."
    )
    shares: Mapping[str, Callable[[EngineReport], float]] = {
        "requests, share of all": lambda engine: engine.num_requests / num_requests,
        METRICS["utilization_ratio"].label: lambda engine: max(
            (stage.utilization_ratio for stage in engine.stages), default=0.0
        ),
        METRICS["kv_utilization_ratio_mean"].label: METRICS["kv_utilization_ratio_mean"].value,
    }
    replica = Column.words("replica", read=lambda engine: str(engine.engine))
    pools = (pool.name for pool in report.pools)
    colors = dict(zip(pools, cycle((BLUE, ORANGE, GREEN, PURPLE, *SERIES, GREY)), strict=False))
    charts = []
    for title, share in shares.items():
        column = Column(title=title, name="share", unit=SHARE, read=share)
        table = Table.of(report.engines, replica, Column.words("pool"), column)
        plot = Plot(title=title, table=table, x="replica", y="share", by="pool", colors=colors)
        charts.append(replace(plot, height=140).histogram())
    return Section(title="Load of the replicas", intro=caption, pictures=charts)


def _transfers(report: ServingReport) -> Section:
    transfer = report.transfer_ms
    first, moved = (
        np.asarray(getattr(report.requests, name), dtype=np.float64)
        for name in ("prompt_end_s", "transferred_s")
    )
    pictures = []
    done = moved >= 0
    if len(moved) == len(first) and done.any():
        values = np.percentile((moved - first)[done] * MS_PER_S, ITL_QUANTILES).tolist()
        plot = Plot(
            title="Prompt computed to KV cache on the decode replica",
            caption="It holds the wait for room on a decode replica and for a free port.",
        )
        curve = Curve(label="transfer", x=values, y=[p / 100 for p in ITL_QUANTILES])
        share = Column(title="share of transfers", name="share", unit=SHARE)
        pictures.append(draw_curves(plot, [curve], x=Column(title="ms"), y=share))
    return Section(
        title="KV transfers",
        intro=(
            "From a request's first token to its KV cache on the decode replica: "
            f"{format_number(transfer.p50)} ms in the median, {format_number(transfer.p99)} ms at "
            "the 99th percentile. The gap to the second token holds it, so the ITL "
            "does; the TTFT does not."
        ),
        table=Table.of(
            report.pools,
            Column.words("pool", "name"),
            Column.words(
                "", "role", lambda pool: "sends" if pool.role == "prefill" else "receives"
            ),
            *(Column.of(name) for name in ("sent_bytes_per_s", "port_utilization_ratio")),
        ),
        pictures=pictures,
    )
