"""Write a quality report as one HTML page that fetches nothing."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foretoken.catalog.dims import Floats, Integers
from foretoken.catalog.quality.flag import code_columns
from foretoken.catalog.quality.ingest import INGEST_TESTS
from foretoken.catalog.quality.stored_row import SUBJECT, bound_rows
from foretoken.catalog.quality.test_definition import all_tests
from foretoken.domain.measurements.measurement import ArrowStream, QualityFinding, QualityReport
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.page.block import Chart, Column, Table, Value
from foretoken.page.chart import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    Plot,
)
from foretoken.page.html import render_sections
from foretoken.page.section import Section
from foretoken.wire.arrow import dims_to_columns, open_stream

_SOUND = "not flagged"
_TEST_COLORS = (
    VERMILION,
    BLUE,
    ORANGE,
    GREEN,
    PURPLE,
    SKY,
    YELLOW,
    "#4b3f8f",
    "#8c6d1f",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cloud:
    """Points of a scatter: the least time their work takes, and the time measured, in µs."""

    least_us: Floats
    latency_us: Floats


def _overview_chart(
    counts: Mapping[str, Mapping[str, int]], colors: Mapping[str, str], caption: str
) -> Chart:
    """Return a bar per device and test with its flagged rows.

    `counts` are rows by device and test; a row that two tests flag counts in both.
    """
    found = [
        (f"{device}: {test}", test, number)
        for device, tests in counts.items()
        for test, number in sorted(tests.items(), key=lambda item: -item[1])
    ]
    columns = (Column.words("device and test", "row"), Column.words("test"), Column(title="rows"))
    plot = Plot(
        title="Overview",
        table=Table(columns=columns, rows=found),
        x="rows",
        y="row",
        by="test",
        colors=colors,
        caption=caption,
    )
    return plot.bars()


def _cloud_chart(
    title: str, clouds: Mapping[str, Cloud], colors: Mapping[str, str], caption: str
) -> Chart:
    """Return time against work, both logarithmic, with the physical bound and the flagged rows."""
    columns = [
        Column.words("", "test"),
        Column(title="least time its work takes (µs)", name="least_us"),
        Column(title="time measured (µs)", name="latency_us"),
    ]
    rows = []
    named = {}
    for name, cloud in clouds.items():
        label = f"{name or _SOUND} ({len(cloud.least_us):,})"
        named[label] = colors.get(name, VERMILION) if name else GREY
        pairs = zip(cloud.least_us.tolist(), cloud.latency_us.tolist(), strict=True)
        rows += [(label, *pair) for pair in pairs]
    plot = Plot(
        title=title,
        table=Table(columns=columns, rows=rows),
        x="least_us",
        y="latency_us",
        by="test",
        colors=named,
        caption=caption,
    )
    return plot.scatter(diagonal=True, log=True)


# Groups that get a picture, and points in one; more say nothing more.
_PICTURES_MAX = 12
_POINTS_MAX = 4000
_NEEDED = (*SUBJECT, "dims", "dtype", "variant", "status", "flags", "latency_us_median")
_OTHER_TESTS = "said by the importer or the sender of the rows"


def write_quality_page(report: QualityReport, rows: ArrowStream, path: Path) -> None:
    """Write what a check found, with pictures of the groups with most flagged rows.

    `rows` are those that were judged, flagged ones included, in the stored schema; of them only
    the pictured groups stay in memory.

    Raises:
        OSError: the file cannot be written.

    """
    subtitle = (
        f"Judged by Foretoken in {report.wall_s:.1f} s. Flagged rows are kept, and left out of"
        " training unless asked for."
    )
    sections = [_overview(report)]
    if report.findings:
        sections += [_tests(report), _pictures(report, rows), _findings(report)]
    page = render_sections("Quality of measurements", subtitle, sections)
    path.write_text(page, encoding="utf-8")


def _overview(report: QualityReport) -> Section:
    counts = {
        "rows judged": report.num_rows,
        "failed": report.num_failed,
        "flagged": report.num_flagged,
        "newly flagged": report.num_new,
        "no longer flagged": report.num_withdrawn,
    }
    return Section(
        title="Rows",
        intro="" if report.findings else "No row is flagged.",
        facts=[Value(label=label, value=f"{count:,}") for label, count in counts.items()],
    )


def _tests(report: QualityReport) -> Section:
    table = Table.listed(
        headers=("test", "finds a row that is"),
        rows=list(_describe_tests(report).items()),
        text_columns=(1,),
    )
    return Section(title="Tests", table=table)


def _pictures(report: QualityReport, rows: ArrowStream) -> Section:
    return Section(
        title="Pictures",
        intro="A point is a row: the time that was measured over the least time its work can take"
        " on that device. No sound row lies below the dashed line.",
        pictures=_draw(report, rows),
    )


def _findings(report: QualityReport) -> Section:
    table = Table.of(
        report.findings,
        *(Column.words(name) for name in ("test", "operator")),
        Column.words("device", read=lambda found: _joined(" · ", found.device, found.topology)),
        Column.words("phase"),
        Column.words(
            "framework, kernel", read=lambda found: _joined(", ", found.framework, found.kernel)
        ),
        *(Column(title=title, name=f"num_{title}") for title in ("rows", "flagged", "new")),
        *(Column.words("example"), Column.words("file", "source_file")),
    )
    return Section(title="Findings", table=table)


def _joined(by: str, *words: str) -> str:
    return by.join(filter(None, words))


def _describe_tests(report: QualityReport) -> Mapping[str, str]:
    """Return what every test with a finding looks for, those with most rows first."""
    known = {**INGEST_TESTS, **{test.name: test.summary for test in all_tests()}}
    found: dict[str, int] = defaultdict(int)
    for finding in report.findings:
        found[finding.test] += finding.num_flagged
    ordered = sorted(found, key=lambda test: (-found[test], test))
    return {test: known.get(test, _OTHER_TESTS) for test in ordered}


def _draw(report: QualityReport, rows: ArrowStream) -> list[Chart]:
    tests = list(_describe_tests(report))
    colors = {test: _TEST_COLORS[n % len(_TEST_COLORS)] for n, test in enumerate(tests)}
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for finding in report.findings:
        counts[finding.device][finding.test] += finding.num_flagged
    caption = "Flagged rows by device and test; a row that two tests flag counts for both."
    charts = [_overview_chart(counts, colors, caption)]
    for subject, found in _collect(report.findings, rows):
        clouds = _split(found)
        if any(clouds):
            caption = _caption_of(report, subject)
            charts.append(_cloud_chart(_title_of(subject), clouds, colors, caption))
    return charts


def _subject_of(finding: QualityFinding) -> tuple[str, ...]:
    return tuple(getattr(finding, name) for name in SUBJECT)


def _title_of(subject: Sequence[str]) -> str:
    operator, device, topology, phase, framework, kernel = subject
    return _joined(" · ", f"{operator} {phase} on {device}", topology, framework, kernel)


def _caption_of(report: QualityReport, subject: tuple[str, ...]) -> str:
    said = [f for f in report.findings if _subject_of(f) == subject]
    return "; ".join(f"{f.num_flagged:,} of {f.num_rows:,}: {f.test}, {f.example}" for f in said)


def _collect(
    findings: Sequence[QualityFinding], rows: ArrowStream
) -> Iterator[tuple[tuple[str, ...], pa.Table]]:
    """Yield the subjects with most flagged rows and their successful rows."""
    subjects = list(dict.fromkeys(_subject_of(finding) for finding in findings))[:_PICTURES_MAX]
    pieces: dict[tuple[str, ...], list[pa.RecordBatch]] = {subject: [] for subject in subjects}
    for batch in open_stream(rows):
        needed = batch.select(_NEEDED)
        is_ok = pc.equal(needed.column("status"), "ok")
        for subject, found in pieces.items():
            mask = is_ok
            for name, value in zip(SUBJECT, subject, strict=True):
                mask = pc.and_(mask, pc.equal(pc.fill_null(needed.column(name), ""), value))
            if pc.any(mask).as_py():
                found.append(needed.filter(mask))
    for subject, found in pieces.items():
        if found:
            yield subject, pa.Table.from_batches(found)


def _split(rows: pa.Table) -> dict[str, Cloud]:
    """Return the points by the first test that flagged them; those without flags under ""."""
    spec = find_operator(rows.column("operator")[0].as_py())
    coded = code_columns(rows, ("topology", "dtype", "phase", "variant"))
    dims = dims_to_columns(rows, spec.dim_names)
    least_us, _ = bound_rows(spec, rows.column("device")[0].as_py(), dims, coded)
    latency_us = rows.column("latency_us_median").to_numpy()
    first = pc.list_element(_filled(rows.column("flags")), 0)
    names = pc.list_element(pc.split_pattern(first, ":", max_splits=1), 0)
    tests = np.asarray(names.to_numpy(zero_copy_only=False), dtype=object)
    is_drawn = (least_us > 0) & (latency_us > 0)
    clouds = {}
    for test in ("", *sorted(set(tests.tolist()) - {""})):
        places = _thin(np.flatnonzero((tests == test) & is_drawn))
        clouds[test] = Cloud(least_us=least_us[places], latency_us=latency_us[places])
    return {test: cloud for test, cloud in clouds.items() if len(cloud.least_us)}


def _filled(flags: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return flags with an empty one where there are none."""
    has_some = pc.greater(pc.fill_null(pc.list_value_length(flags), 0), 0)
    return pc.if_else(has_some, flags, pa.scalar([""], flags.type))


def _thin(places: Integers) -> Integers:
    """Return at most so many places as a picture needs, evenly spread."""
    if len(places) <= _POINTS_MAX:
        return places
    return places[np.linspace(0, len(places) - 1, _POINTS_MAX).astype(np.int64)]
