"""What searches say of other spaces: the space with one thing changed, and what is ruled out."""

from collections.abc import Iterable, Sequence

from foretoken.domain.metrics.metric import SHARE
from foretoken.domain.requests.search import Sensitivity
from foretoken.domain.requests.training_search import StrategySensitivity
from foretoken.page.block import Cell, Column, Table
from foretoken.page.chart import Plot
from foretoken.page.section import Section

Change = Sensitivity | StrategySensitivity


def what_if_section(
    intro: str, what: str, changes: Sequence[Change], best: str, columns: Iterable[Column]
) -> Section:
    """Return what would be best with one thing changed, after what `columns` say of it.

    `what` a bar shows is the throughput of the best against today's, whose name is `best`.
    """
    # Where nothing fits today, or then, there is nothing to compare.
    compared = [item for item in changes if item.throughput_ratio]
    against = Column(
        title="against today", name="by", unit=SHARE, read=lambda item: item.throughput_ratio - 1
    )
    plot = Plot(
        title=what,
        table=Table.of(compared, CHANGE, against),
        x="by",
        y="change",
        caption="What moves the answer is what limits it.",
    )
    return Section(
        title="What if",
        intro=intro.format(f", {best}" if best else ""),
        pictures=[plot.bars()] if compared else [],
        table=Table.of(changes, *change_columns(columns)),
    )


CHANGE = Column.words("change")


def change_columns(columns: Iterable[Column]) -> list[Column]:
    """Return the columns of changes: what each does, after what `columns` say of its best."""

    def best(item: Change) -> str | Cell:
        then = describe_best_then(item)
        return then if item.is_same_best else Cell(value=then, tone="calm")

    then = Column.words("best then", read=best)
    return [CHANGE, Column(title="", read=describe_change), *columns, then]


def describe_change(item: Change) -> str:
    """Return what the best of a change is over the best today."""
    return percent(item.throughput_ratio) if item.throughput_ratio else ""


def describe_best_then(item: Change) -> str:
    """Return what is best under a change."""
    if not item.best:
        return "nothing fits"
    return "the same" if item.is_same_best else item.best


def percent(ratio: float) -> str:
    """Return a change in percent, without a sign of nothing."""
    return f"{round(ratio - 1, 3) + 0.0:+.1%}"
