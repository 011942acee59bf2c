"""The pictures of several whole training runs side by side."""

from collections.abc import Iterator, Mapping, Sequence

from foretoken.domain.requests.training_run import RunSize, TrainingRunReport
from foretoken.page.figure import SERIES, plain_text
from foretoken.page.section import Picture, Section
from foretoken.simulator.report.interval_plot import Interval, draw_intervals
from foretoken.simulator.report.plots import draw_stacked_rows
from foretoken.simulator.report.training_run_plots import Line, LogChart, draw_charts
from foretoken.simulator.report.training_run_sections import COLORS, days_by_use, lost_days

Reports = Mapping[str, TrainingRunReport]


def training_run_pictures(reports: Reports) -> list[Section]:
    """Return the days with their bounds, what they are spent on, and other numbers of devices."""
    timed = {label: report for label, report in reports.items() if report.days > 0}
    if not timed:
        return []
    sections = [Section(title="Where the days go", pictures=list(_days(timed, reports)))]
    sized = {label: sizes for label, report in timed.items() if (sizes := _sizes(report))}
    if sized:
        sections.append(_more_devices(sized, reports))
    return sections


def _colors(reports: Reports) -> Mapping[str, str]:
    return dict(zip(reports, SERIES, strict=False))


def _days(timed: Reports, reports: Reports) -> Iterator[Picture]:
    intervals = [
        Interval(
            label=label,
            low=report.days_low,
            value=report.days,
            high=report.days_high,
            color=_colors(reports)[label],
        )
        for label, report in timed.items()
    ]
    yield Picture(
        svg=draw_intervals("compare-days", "Expected days with their interval", "days", intervals),
        caption="A bar is the run with every operator at its lower, and at its upper, 90 % bound.",
    )
    rows = {plain_text(label): days_by_use(report) for label, report in timed.items()}
    yield Picture(
        svg=draw_stacked_rows("compare-uses", "The expected days", "days", rows, COLORS),
        caption="By what they are spent on.",
    )
    lost = {plain_text(label): lost_days(report) for label, report in timed.items()}
    if any(lost.values()):
        yield Picture(
            svg=draw_stacked_rows("compare-lost", "What is lost", "days", lost, COLORS),
            caption="The same without the steps that count.",
        )


def _sizes(report: TrainingRunReport) -> list[RunSize]:
    """Return the sizes that can run, the fewest devices first."""
    return sorted((size for size in report.sizes if size.days), key=lambda size: size.num_devices)


def _more_devices(sized: Mapping[str, Sequence[RunSize]], reports: Reports) -> Section:
    counts = sorted({size.num_devices for sizes in sized.values() for size in sizes})
    charts = [
        LogChart(
            title="Days",
            x_label="devices",
            y_label="days",
            x=counts,
            lines=[
                _line(label, sizes, [size.days for size in sizes], reports)
                for label, sizes in sized.items()
            ],
        )
    ]
    priced = {label: sizes for label, sizes in sized.items() if any(size.usd for size in sizes)}
    if priced:
        lines = [
            _line(label, sizes, [size.usd / 1e3 for size in sizes], reports)
            for label, sizes in priced.items()
        ]
        charts.append(
            LogChart(title="Cost", x_label="devices", y_label="1000 USD", x=counts, lines=lines)
        )
    caption = "The same batch over more replicas: each does less between sums of gradients."
    return Section(
        title="More or fewer devices",
        pictures=[Picture(svg=draw_charts("compare-sizes", charts), caption=caption)],
    )


def _line(label: str, sizes: Sequence[RunSize], values: Sequence[float], reports: Reports) -> Line:
    return Line(
        label=plain_text(label),
        x=[size.num_devices for size in sizes],
        y=values,
        color=_colors(reports)[label],
    )
