"""Measurements of one operator: their curves, one estimate explained, and what checks found."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import pyarrow as pa
import pyarrow.compute as pc

from foretoken.app.cli.dim_text import order_dims, parse_whole, split_words
from foretoken.app.web.question import find_problems
from foretoken.app.web.views.results import send_page
from foretoken.app.web.visit import Redirect, Sent, Shown, Visit
from foretoken.client.single_query import CallOptions, build_single_query
from foretoken.domain.errors import ForetokenError, InvalidRequestError
from foretoken.domain.hardware.device import all_devices
from foretoken.domain.measurements.estimate import Explanation
from foretoken.domain.measurements.measurement import CheckRequest, MeasurementFilter
from foretoken.domain.operators.spec.operator import all_operators, find_operator
from foretoken.page.block import Block, Column, Figures, Scalar, Section, Table, Text, Value
from foretoken.page.html import render_blocks
from foretoken.simulator.measured_curves import MeasuredCurve, fit_curves, read_curves
from foretoken.simulator.report.profile_curves import MAX_PANELS, render_profile
from foretoken.wire.arrow import read_table

_EXAMPLE: Final = {
    "operator": "gemm",
    "device": "h100_sxm",
    "dims": "m=1024 n=4096 k=4096",
    "dtype": "bf16",
}
_OPTIONS: Final = ("variant", "kernel", "framework")
_SHOWN_DTYPES: Final = 12


def show_curves(visit: Visit) -> Shown:
    """Show the form of curves, and below it the curves of what it names."""
    found: dict[tuple[str, str], list[str]] = {}
    for entry in visit.catalog.describe_coverage():
        dtypes = found.setdefault((entry.operator, entry.device), [])
        if entry.dtype not in dtypes:
            dtypes.append(entry.dtype)
    operator, device = visit.first("operator"), visit.first("device")
    content = {
        "measured": sorted(found),
        "dtypes": found.get((operator, device), [])[:_SHOWN_DTYPES],
        "asked": visit.asked,
        "query": urlencode(visit.asked),
        "is_known": (operator, device) in found,
    }
    return Shown(template="curves.html", content=content)


def send_curves(visit: Visit) -> Sent:
    """Send the page of the curves with the most points, with the predictor's band."""
    operator = find_operator(visit.first("operator")).name
    device = visit.first("device")
    selection = MeasurementFilter(
        operator=operator,
        device=device,
        framework=visit.first("framework"),
        include_flagged=True,
    )
    rows = read_table(visit.catalog.read_measurements(selection))
    if dtype := visit.first("dtype"):
        rows = rows.filter(pc.equal(rows.column("dtype"), dtype))
    is_flagged = pc.greater(pc.fill_null(pc.list_value_length(rows.column("flags")), 0), 0)
    curves = read_curves(rows.filter(pc.invert(is_flagged)))[:MAX_PANELS]
    if not curves:
        raise InvalidRequestError.of_field(
            "operator", f"no measurement of {operator} on {device} is free of flags"
        )
    left_out = _curves_of(rows.filter(is_flagged), curves)
    fitted = fit_curves(curves, visit.predictor, selection.framework)
    return send_page(render_profile(f"{operator} on {device}", fitted, left_out))


def _curves_of(rows: pa.Table, curves: Sequence[MeasuredCurve]) -> list[MeasuredCurve]:
    """Return the curves of flagged rows next to those that are drawn."""
    keys = {curve.key for curve in curves}
    return [curve for curve in read_curves(rows) if curve.key in keys]


def show_estimate(visit: Visit) -> Shown:
    """Show the form of one call, and what its estimate is made of."""
    given = visit.asked or dict(_EXAMPLE)
    problems: dict[str, str] = {}
    blocks: Sequence[Block] = ()
    status = 200
    if visit.asked:
        try:
            blocks = explanation_blocks(given["operator"], _explain(visit, given))
        except KeyError as err:
            problems, status = {str(err.args[0]): "is needed"}, 400
        except ForetokenError as err:
            problems, status = _read_problems(err), 400
    content = {
        "given": given,
        "problems": problems,
        "operators": list(all_operators()),
        "devices": {device.name: device.description for device in all_devices().values()},
        "blocks": render_blocks(blocks),
    }
    return Shown(template="estimate.html", content=content, status=status)


def _read_problems(error: ForetokenError) -> dict[str, str]:
    if error.reason in {"UNKNOWN_OPERATOR", "UNKNOWN_TOPOLOGY"}:
        return {"": error.message}
    return find_problems(error)


def _explain(visit: Visit, given: dict[str, str]) -> Explanation:
    dims = given.get("dims", "").split()
    if unread := [word for word in dims if "=" not in word]:
        raise InvalidRequestError.of_field("dims", f"expected NAME=VALUE, found {unread[0]!r}")
    said, sizes = split_words(dims, ("phase", *_OPTIONS))
    words: dict[str, Any] = {name: said[name] for name in _OPTIONS if name in said}
    query = build_single_query(
        given["operator"],
        {name: parse_whole(name, value) for name, value in sizes.items()},
        device=given["device"],
        dtype=given.get("dtype") or "bf16",
        phase=said.get("phase", "forward"),
        options=CallOptions(**words),
    )
    return visit.predictor.explain(query)


def explanation_blocks(operator: str, found: Explanation) -> list[Block]:
    """Return what an estimate is made of as blocks of a page."""
    estimate = found.estimate
    values = [
        Value(
            label="latency",
            value=estimate.latency_us,
            unit="µs",
            low=estimate.low_us,
            high=estimate.high_us,
            note="90 % interval",
        ),
        Value(label="rests on", value=estimate.provenance.name.lower(), note=estimate.basis),
        Value(label="lies", value=found.tier, note="to what was measured"),
        Value(
            label="the device allows",
            value=max(found.floor_us, found.compute_us, found.memory_us),
            unit="µs",
            note=f"launch {found.floor_us:.3g}, compute {found.compute_us:.3g},"
            f" memory or links {found.memory_us:.3g}",
        ),
    ]
    return [
        Figures(values),
        _section(
            "Ways of estimating",
            ("way", "says (µs)", "weight (%)"),
            [(one.name, one.latency_us, 100 * one.weight_ratio) for one in found.members],
        ),
        _section(
            "What moves the trees' answer",
            ("feature", "value", "factor"),
            [(one.feature, one.value, one.factor) for one in found.contributions],
        ),
        _neighbours(operator, found),
    ]


def _neighbours(operator: str, found: Explanation) -> Section:
    points = [order_dims(operator, near.dims) for near in found.neighbours]
    names = tuple(points[0]) if points else ("point",)
    rows = [
        (*point.values(), near.latency_us, near.distance_octaves)
        for point, near in zip(points, found.neighbours, strict=True)
    ]
    return _section("Nearest measurements", (*names, "took (µs)", "away (octaves)"), rows)


def _section(title: str, names: Sequence[str], rows: Sequence[Sequence[Scalar]]) -> Section:
    if not rows:
        return Section(title, [Text("None.")])
    columns = [Column.words(names[0]), *(Column(title=name) for name in names[1:])]
    return Section(title, [Table(columns=columns, rows=rows)])


def check(visit: Visit) -> Redirect:
    """Have stored rows judged again; go to the job."""
    request = CheckRequest(
        operator=visit.posted.get("operator", ""), device=visit.posted.get("device", "")
    )
    job = visit.catalog.create_check(request)
    return Redirect(f"/jobs/catalog/{job.job_id}")


def show_quality(visit: Visit) -> Shown:
    """Show what a check found."""
    job_id = visit.place["job"]
    visit.catalog.get_check_report(job_id)
    return Shown(template="quality.html", content={"job_id": job_id})


def send_quality(visit: Visit) -> Sent:
    """Send the page of a check with pictures of the groups with most flagged rows."""
    # Half a second that no other page should wait.
    from foretoken.catalog.quality.page import write_quality_page

    report = visit.catalog.get_check_report(visit.place["job"])
    rows = visit.catalog.read_measurements(MeasurementFilter(include_flagged=True))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quality.html"
        write_quality_page(report, rows, path)
        return send_page(path.read_text(encoding="utf-8"))
