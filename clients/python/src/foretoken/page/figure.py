"""How figures look that are written as picture files.

Colours that people with any colour vision can tell apart: Okabe and Ito, "Color Universal Design",
2008.
"""

from typing import Any

INK = "#0b0c0e"

BLUE, ORANGE, GREEN = "#0072b2", "#e69f00", "#009e73"
VERMILION, SKY, PURPLE = "#d55e00", "#56b4e9", "#cc79a7"
YELLOW, GREY = "#d8c92f", "#8f959c"

SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)

WIDTH_INCHES = 9.0

# For `matplotlib.rc_context`, around the making of a figure.
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
