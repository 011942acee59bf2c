"""Draw the bandwidth of collectives over the size of their messages."""

from collections.abc import Mapping
from pathlib import Path

from foretoken.app.cli.collective_calls import format_size
from foretoken.app.cli.collective_timings import Key, Timing, describe_group

_HEIGHT_INCHES = 5.0
_DOTS_PER_INCH = 150
# One dash pattern per group, one colour per operator.
_DASHES = ((0, ()), (0, (5, 2)), (0, (1, 1.5)), (0, (7, 2, 1, 2)))
_NUM_TICKS = 8


def write_bandwidth_figure(path: Path, timings: Mapping[Key, Timing]) -> None:
    """Write bus bandwidth over message size, both logarithmic: a line per operator and group.

    The format is that of the path's ending.
    """
    # Half a second that no other command should wait.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from foretoken.page.figure import SERIES, STYLE, WIDTH_INCHES

    lines = group_lines(timings)
    operators = list(dict.fromkeys(operator for operator, _ in lines))
    groups = list(dict.fromkeys(group for _, group in lines))
    sizes = sorted({size for points in lines.values() for size, _ in points})
    with rc_context({**STYLE, "figure.facecolor": "white"}):
        figure = Figure(figsize=(WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
        axes = figure.subplots()
        for (operator, group), points in lines.items():
            axes.plot(
                [size for size, _ in points],
                [bandwidth for _, bandwidth in points],
                marker="o",
                color=SERIES[operators.index(operator) % len(SERIES)],
                linestyle=_DASHES[groups.index(group) % len(_DASHES)],
                label=f"{operator} {group}",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        shown = sizes[:: max(1, -(-len(sizes) // _NUM_TICKS))]
        axes.set_xticks(shown, [format_size(size) for size in shown])
        axes.grid(visible=True)
        axes.set_xlabel("message")
        axes.set_ylabel("bus bandwidth (GB/s)")
        axes.set_title("What a rank sends over the time it takes; groups are devices x nodes")
        figure.legend(loc="outside right upper")
        figure.savefig(path, dpi=_DOTS_PER_INCH, facecolor="white")


def group_lines(
    timings: Mapping[Key, Timing],
) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return (size in bytes, bus bandwidth in GB/s) by operator and group, ascending."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for timing in timings.values():
        place = (timing.call.operator, describe_group(timing.call))
        point = (timing.call.dims["message_bytes"], timing.bus_gb_per_s)
        lines.setdefault(place, []).append(point)
    return {place: sorted(points) for place, points in lines.items()}
