"""Where the time of the best simulated candidate of every search goes."""

from collections.abc import Mapping

from foretoken.domain.metrics.metric import largest_first
from foretoken.domain.requests.search import ServingSearchReport
from foretoken.domain.requests.training_search import TrainingSearchReport
from foretoken.domain.results.training_report import TrainingReport
from foretoken.page.figure import plain_text
from foretoken.page.section import Picture, Section
from foretoken.simulator.report.palette import color_of_group, label_of_group
from foretoken.simulator.report.plots import draw_stacked_rows

Reports = Mapping[str, ServingSearchReport | TrainingSearchReport]


def simulated_pictures(reports: Reports) -> list[Section]:
    """Return the sections of the best of every search that was simulated; none where none was."""
    shares: dict[str, Mapping[str, float]] = {}
    times_ms: dict[str, Mapping[str, float]] = {}
    for label, report in reports.items():
        ranked = [finalist for finalist in report.finalists if finalist.rank > 0]
        best = min(ranked, key=lambda finalist: finalist.rank, default=None)
        if best is None:
            continue
        name = plain_text(f"{label.partition(':')[0]}: {best.name}")
        if isinstance(best.report, TrainingReport):
            times_ms[name] = best.report.step_time_ms_by_group
        else:
            times_s = best.report.step_time_s_by_group
            busy_s = sum(times_s.values()) or 1.0
            shares[name] = {group: 100 * time_s / busy_s for group, time_s in times_s.items()}
    pictures = []
    if times_ms:
        pictures.append(_picture(("Critical stage, one step", "time (ms)"), times_ms))
    if shares:
        pictures.append(_picture(("Steps of all engines", "share of the busy time (%)"), shares))
    return [Section(title="The best, simulated", pictures=pictures)] if pictures else []


def _picture(labels: tuple[str, str], rows: Mapping[str, Mapping[str, float]]) -> Picture:
    title, x_label = labels
    groups = largest_first(rows.values())
    svg = draw_stacked_rows(
        "compare-finalists",
        title,
        x_label,
        {
            name: {label_of_group(group): value for group, value in parts.items()}
            for name, parts in rows.items()
        },
        {label_of_group(group): color_of_group(group) for group in groups},
    )
    return Picture(svg=svg, caption="Of the first of every search that its simulation bears out.")
