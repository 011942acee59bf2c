"""`foretoken profile`: time operators and record them."""

from typing import Annotated

import typer

from foretoken.app.cli.state import note, open_composition, show_progress, state_of
from foretoken.domain.ports import ProfileRequest


def profile(
    context: typer.Context,
    device: Annotated[
        str, typer.Option(help="Device of this machine, by its catalog name: `cpu`, `h200_sxm`.")
    ] = "cpu",
    quick: Annotated[
        bool, typer.Option("--quick", help="A small sweep: about a minute on a CPU.")
    ] = False,
    operator: Annotated[
        list[str] | None, typer.Option(help="Only this operator. Repeatable.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure points the catalog already has, too.")
    ] = False,
    time_cap_s: Annotated[
        float,
        typer.Option(help="Stop after this many seconds; what is left is counted (0: no cap)."),
    ] = 0.0,
) -> None:
    """Time operators on this machine's device and stream them into the catalog.

    Rows are safe in the catalog as they come: stopping half way keeps what was measured, and the
    next run goes on with the rest.
    """
    state = state_of(context)
    request = ProfileRequest(
        device=device,
        operators=tuple(operator or ()),
        quick=quick,
        skip_covered=not again,
        time_cap_s=time_cap_s,
    )
    with open_composition(state) as services:
        note(f"profiling {device}; Ctrl-C stops and keeps what is recorded")
        with show_progress("profile") as update:
            report = services.foretoken("profiler").profile(request, on_progress=update)
        state.print_rows(
            f"Profiled {report.device}",
            ("run", "planned", "measured", "failed", "skipped", "seconds"),
            [
                (
                    report.run_id,
                    report.num_planned,
                    report.num_measured,
                    report.num_failed,
                    report.num_skipped,
                    report.wall_s,
                )
            ],
        )
