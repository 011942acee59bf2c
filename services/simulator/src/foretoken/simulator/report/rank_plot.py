"""Draw how names are ranked in several lists, as one SVG text."""

from collections.abc import Iterable, Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from foretoken.page.figure import (
    GREEN,
    GREY,
    STYLE,
    VERMILION,
    WIDTH_INCHES,
    figure_to_svg,
    plain_text,
)

_ROW_INCHES = 0.27
_LETTER_INCHES = 0.068
# Longer names are cut; next to the lines they take at most this share of the width on each side.
_MAX_LETTERS = 52
_MAX_SHARE = 0.42


def draw_ranks(
    slug: str, title: str, lists: Sequence[str], ranks: Mapping[str, Sequence[int]]
) -> str:
    """Draw a line per name from list to list, best on top, with its rank at both ends.

    `ranks` has one rank per list. Names stand one below the other in every list; lines that climb
    past others from the first list to the last are green, those that fall vermilion.
    """
    orders = [_places(ranks, column) for column in range(len(lists))]
    last = len(lists) - 1
    with rc_context(STYLE):
        size = (WIDTH_INCHES, 1.2 + _ROW_INCHES * len(ranks))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        for name, of_lists in ranks.items():
            places = [order[name] for order in orders]
            gain = places[0] - places[-1]
            color = GREEN if gain > 0 else VERMILION if gain < 0 else GREY
            axes.plot(range(len(lists)), places, "o-", color=color, linewidth=1.6)
            for x, side, offset in ((0, "right", -8), (last, "left", 8)):
                shown = name if len(name) <= _MAX_LETTERS else name[: _MAX_LETTERS - 1] + "…"
                text = f"{shown}  {of_lists[0]}" if x == 0 else f"{of_lists[-1]}  {shown}"
                axes.annotate(
                    plain_text(text),
                    (x, places[x]),
                    xytext=(offset, 0),
                    textcoords="offset points",
                    ha=side,
                    va="center",
                    fontsize=8,
                )
        axes.set_xticks(range(len(lists)), [plain_text(name) for name in lists])
        axes.xaxis.tick_top()
        axes.set_yticks([])
        axes.set_ylim(len(ranks) - 0.4, -0.6)
        margin = _margin(ranks, last)
        axes.set_xlim(-margin, last + margin)
        axes.tick_params(axis="x", length=0)
        for side in ("left", "top", "bottom"):
            axes.spines[side].set_visible(False)
        axes.set_title(title)
        return figure_to_svg(figure, slug)


def _margin(names: Iterable[str], width: int) -> float:
    """Return the room on each side of lines that are so wide, for the longest name next to them."""
    letters = min(max(map(len, names)), _MAX_LETTERS) + len("  1,000")
    share = min(letters * _LETTER_INCHES / WIDTH_INCHES, _MAX_SHARE)
    return width * share / (1 - 2 * share)


def _places(ranks: Mapping[str, Sequence[int]], column: int) -> Mapping[str, int]:
    """Return the place of every name in a list; those of equal rank keep their order."""
    ordered = sorted(ranks, key=lambda name: ranks[name][column])
    return {name: place for place, name in enumerate(ordered)}
