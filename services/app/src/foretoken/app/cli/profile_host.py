"""`foretoken profile host`: launches, a model's own code, sampling and text, on the host."""

import threading
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from foretoken.app.cli.stack import stack
from foretoken.app.cli.state import build_table, open_composition, show_progress, state_of
from foretoken.app.config import EMBEDDED
from foretoken.domain.alias import canonical_device
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.ports import CatalogPort
from foretoken.jobs.runner import JobProgress

if TYPE_CHECKING:
    from foretoken.profiler.host.measuring import HostReport


def host(
    context: typer.Context,
    device: Annotated[
        str,
        typer.Option(help="Device of this machine: `cpu`, `h200_sxm`.", callback=canonical_device),
    ] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points: some seconds.")] = False,
) -> None:
    """Time what the host takes beside the kernels, and record it as `launch_gap`, `host_step`.

    On a GPU: how long the host needs to launch kernels, one by one, as a CUDA graph, and through
    the modules of a model; on a CPU, what a model takes beside its operators. And what sampling,
    fetching tokens and making text of them take for a batch. `foretoken validate steps` needs it;
    `launch_us` of an engine's or a trainer's rules may be set to what one kernel more takes.

    Example: `foretoken profile host --device h200_sxm`
    """
    state = state_of(context)
    if state.config.endpoints.profiler != EMBEDDED:
        raise typer.BadParameter(
            "the host is timed in this process: leave out --endpoint profiler=... and run the"
            " command on the machine of the device"
        )
    with open_composition(state) as services:
        num_threads = int(state.config.profiler.get("num_threads") or 0)
        report = _measure(services.catalog, device, quick=quick, num_threads=num_threads)
        state.print_object(report, lambda: host_table(report))


def _measure(catalog: CatalogPort, device: str, *, quick: bool, num_threads: int) -> "HostReport":
    try:
        from foretoken.profiler.host.measuring import measure_host
        from foretoken.profiler.local_device import find_local_device
    except ImportError as err:
        raise InvalidRequestError(
            "timing the host needs torch and transformers: pip install 'foretoken[profiler,graphs]'"
        ) from err
    with show_progress(f"time the host of {device}") as update:
        progress = JobProgress(update.set, threading.Event())
        return measure_host(
            find_local_device(device), catalog, progress, quick=quick, num_threads=num_threads
        )


def host_table(report: "HostReport") -> Table:
    """Return a report for a terminal."""
    rows = [
        (
            item.operator,
            item.part,
            item.largest,
            item.latency_us,
            item.slope_us,
        )
        for item in report.parts
    ]
    columns = ("operator", "part", "kernels or sequences", "takes (µs)", "each more (µs)")
    title = f"Host of {report.device}: {report.num_rows} rows in {report.wall_s:.1f} s"
    notes = list(report.notes)
    if report.num_flagged:
        notes.insert(
            0, f"{report.num_flagged} rows are flagged and not learned from: the machine was busy"
        )
    return stack(build_table(title, columns, rows), *notes)
