"""The part of a training search's page that counts every strategy, and why most are out."""

from collections.abc import Sequence

from foretoken.domain.requests.training_search import RuledOut, TrainingSearchReport
from foretoken.page.block import Chart, Column
from foretoken.page.chart import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, Plot
from foretoken.page.curve import draw_counts
from foretoken.page.section import DataTable, Section
from foretoken.simulator.report.training_search_rows import describe_verdict

_OF_STAGE = {
    "points of the space": SKY,
    "can run": BLUE,
    "fit the memory": GREEN,
    "simulated": ORANGE,
}
_MEMORY = "memory"


def counts_section(report: TrainingSearchReport) -> Section:
    """Return how many strategies are left after each question, and what rules the others out."""
    pictures = [_funnel(report)]
    ordered = sorted(report.ruled_out, key=lambda item: -item.num_strategies)
    rows = [
        (describe_verdict(item.verdict), f"{item.num_strategies:,}", item.example, item.reason)
        for item in ordered
    ]
    headers = ("ruled out", "strategies", "for example", "because")
    if ordered:
        pictures.append(_reasons(ordered))
    return Section(
        title="Every strategy, counted",
        pictures=pictures,
        table=DataTable(headers=headers, rows=rows, text_columns=(2, 3)) if rows else None,
    )


def _funnel(report: TrainingSearchReport) -> Chart:
    counts = (report.num_points, report.num_legal, report.num_fitting, report.num_simulated)
    caption = f"All that can run are answered in closed form, of {report.num_shapes:,} shapes."
    plot = Plot(title="What is left of the space", caption=caption, colors=_OF_STAGE)
    named = dict(zip(_OF_STAGE, counts, strict=True))
    return draw_counts(plot, named, Column(title="strategies"), total=report.num_points)


def _reasons(ordered: Sequence[RuledOut]) -> Chart:
    counts: dict[str, int] = {}
    for item in ordered:
        name = describe_verdict(item.verdict)
        counts[name] = counts.get(name, 0) + item.num_strategies
    colors = dict.fromkeys(counts, GREY) | {describe_verdict(_MEMORY): PURPLE}
    caption = (
        "A strategy is counted once, by the first rule that it breaks; then those that say the same"
        " as another, of which the other counts; memory last."
    )
    plot = Plot(title="What rules strategies out", caption=caption, colors=colors)
    return draw_counts(plot, counts, Column(title="strategies"))
