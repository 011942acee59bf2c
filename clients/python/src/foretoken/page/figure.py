"""How all figures look, and how one becomes part of a page.

Colours that people with any colour vision can tell apart: Okabe and Ito, "Color Universal Design",
2008.
"""

import io
import re
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Stands for the page's text colour: the SVG says `currentColor` instead, so a figure reads on a
# light and on a dark page.
INK = "#0b0c0e"

BLUE, ORANGE, GREEN = "#0072b2", "#e69f00", "#009e73"
VERMILION, SKY, PURPLE = "#d55e00", "#56b4e9", "#cc79a7"
YELLOW, GREY = "#d8c92f", "#8f959c"

SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)

WIDTH_INCHES = 9.0

# For `matplotlib.rc_context`, around the making of a figure and `figure_to_svg`.
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelsize": 9.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "grid.color": INK,
    "grid.alpha": 0.14,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.9,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.title_fontsize": 9,
    "figure.constrained_layout.h_pad": 0.09,
    "figure.constrained_layout.w_pad": 0.07,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "foretoken",
}

_DOTS_PER_INCH = 150


def plain_text(text: str) -> str:
    """Return text that is drawn as it stands; a dollar would begin a formula."""
    return text.replace("$", r"\$")


def figure_to_svg(figure: Figure, slug: str) -> str:
    """Return the figure as an SVG element that can stand inside a page with others.

    `slug` begins the ids of its parts; each figure of a page needs its own.
    """
    file = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    # As `savefig` does, which first draws the figure once more to lay it out.
    figure.set_dpi(_DOTS_PER_INCH)
    FigureCanvasSVG(figure).print_svg(file, metadata=metadata)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # Ids are unique in a figure only.
    svg = re.sub(r'\bid="', f'id="{slug}-', svg)
    svg = svg.replace('href="#', f'href="#{slug}-').replace("url(#", f"url(#{slug}-")
    return svg.replace(INK, "currentColor")
