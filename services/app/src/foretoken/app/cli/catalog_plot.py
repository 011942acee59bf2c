"""`foretoken catalog plot`: pictures of a profile, measured points with the fitted curve."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from foretoken.app.cli.catalog_snapshots import Where, selection_of
from foretoken.app.cli.picture_file import check_page_option, check_picture_option
from foretoken.app.cli.state import note, open_composition, state_of
from foretoken.app.compose import Composition
from foretoken.domain.alias import canonical_device
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.simulator.report.profile_groups import FittedCurve, fit_curves, read_curves
from foretoken.wire.arrow import read_table


def plot(
    context: typer.Context,
    operator: Annotated[
        list[str],
        typer.Option(help="Operator: see `foretoken list operators`. Repeatable."),
    ],
    where: Where = None,
    page: Annotated[
        Path | None,
        typer.Option(help="Write a page with all pictures here.", callback=check_page_option),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Write the curves of one operator here, as .png, .svg or .pdf.",
            callback=check_picture_option,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="Device: see `foretoken list devices`.", callback=canonical_device),
    ] = "",
) -> None:
    """Draw what was measured of operators, and what the predictor makes of it.

    Collectives: bandwidth over the bytes of the message, a panel for each group of devices per node
    and nodes. Products and others: FLOP/s, or bytes/s, over the first dimension, a panel for each
    shape. Prints how far the curve is from the points.

    Example: `foretoken catalog plot --device a100_sxm_80 --operator all_reduce --page curves.html`
    """
    state = state_of(context)
    with open_composition(state) as services:
        curves: list[FittedCurve] = []
        for name in operator:
            curves += _read_curves(services, name, device, where or [])
        if picture is not None:
            _write_picture(picture, curves)
        if page is not None:
            # Half a second that no other command should wait.
            from foretoken.simulator.report.profile_curves import render_profile

            title = f"{', '.join(operator)}{f' on {device}' if device else ''}"
            page.write_text(render_profile(title, curves), encoding="utf-8")
            note(f"page written to {page}")
        state.print_rows(
            "Measured and fitted",
            ("operator", "device", "curve", "points", "median error", "worst error", "rests on"),
            [_row(curve) for curve in curves],
        )


def _read_curves(
    services: Composition, operator: str, device: str, where: Sequence[str]
) -> Sequence[FittedCurve]:
    words = [*where, f"operator={find_operator(operator).name}"]
    selection = selection_of([*words, *([f"device={device}"] if device else [])])
    found = read_curves(read_table(services.catalog.read_measurements(selection)))
    if not found:
        raise InvalidRequestError.of_field(
            "--operator",
            f"nothing was measured of {operator}{f' on {device}' if device else ''};"
            " `foretoken catalog coverage` lists what was, and `--where"
            " include_flagged=true` takes doubtful rows too",
        )
    return fit_curves(found, services.predictor, selection.framework)


def _write_picture(path: Path, curves: Sequence[FittedCurve]) -> None:
    from foretoken.simulator.report.profile_curves import write_profile_figure

    places = {(c.measured.key.operator, c.measured.key.device) for c in curves}
    if len(places) > 1:
        raise InvalidRequestError.of_field(
            "--picture", "is of one operator on one device; use --page for several"
        )
    write_profile_figure(path, curves)
    note(f"picture written to {path}")


def _row(curve: FittedCurve) -> tuple[object, ...]:
    return (
        curve.measured.key.operator,
        curve.measured.key.device,
        curve.measured.key.title,
        len(curve.measured.sizes),
        f"{float(np.median(np.abs(curve.error_ratio))):.1%}",
        f"{float(np.max(np.abs(curve.error_ratio))):.1%}",
        curve.provenance,
    )
