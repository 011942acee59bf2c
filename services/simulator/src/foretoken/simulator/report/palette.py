"""Colours that people with any colour vision can tell apart, and the figure style.

Source of the colours: Okabe and Ito, "Color Universal Design", 2008.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# Stands for the page's text colour: the SVG says `currentColor` instead, so a figure reads on a
# light and on a dark page.
INK = "#0b0c0e"

BLUE, ORANGE, GREEN = "#0072b2", "#e69f00", "#009e73"
VERMILION, SKY, PURPLE = "#d55e00", "#56b4e9", "#cc79a7"
YELLOW, GREY = "#d8c92f", "#8f959c"

SERIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION)

# Few enough names to give each its own colour wherever it appears.
_OF_GROUP: Mapping[str, str] = {
    "gemm": BLUE,
    "attention": ORANGE,
    "elementwise": SKY,
    "moe": "#4b3f8f",
    "collective": VERMILION,
    "stage_transfer": PURPLE,
    "gradient_reduction": "#a8452f",
    "parameter_gather": "#e9a3c4",
    "recompute": "#7fb5a0",
    "optimizer": GREEN,
    "embedding": YELLOW,
    "loss": "#8c6d1f",
    "sampler": "#5b8f29",
    "host": "#5f6b7a",
    "bubble": GREY,
    "other": GREY,
}

OF_PROVENANCE: Mapping[str, str] = {
    "measured": GREEN,
    "interpolated": BLUE,
    "extrapolated": ORANGE,
    "analytical": GREY,
}

OF_MEMORY: Mapping[str, str] = {
    "weights": BLUE,
    "gradients": SKY,
    "optimizer": GREEN,
    "activations": ORANGE,
    "temporary": PURPLE,
}

OF_SPAN: Mapping[str, str] = {
    "forward": BLUE,
    "backward": ORANGE,
    "transfer": PURPLE,
    "gradient_reduction": VERMILION,
    "optimizer": GREEN,
}

# Colours lighter than this (of 255) carry dark text.
_DARK_TEXT_LUMA = 125

# Light to dark with load, readable on white and on near-black.
_LOADS = ("#8fc7e8", "#56b4e9", "#2f93cf", "#0072b2", "#7a5195", "#bc5090", "#ef5675", "#d55e00")

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


def label_of_group(group: str) -> str:
    """Return how a page writes an operator group."""
    return "GEMM" if group == "gemm" else group.replace("_", " ")


def color_of_group(group: str) -> str:
    """Return the colour of an operator group; grey for one not known here."""
    return _OF_GROUP.get(group, GREY)


def text_color_on(color: str) -> str:
    """Return white or near-black, whichever reads better on a colour such as `#0072b2`."""
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    # Source of the weights: ITU-R BT.709, luma.
    luma = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#16191d" if luma > _DARK_TEXT_LUMA else "#ffffff"


def colors_of_loads(num_loads: int) -> Sequence[str]:
    """Return a colour per load, evenly picked from light to dark."""
    if num_loads == 1:
        return (BLUE,)
    last = len(_LOADS) - 1
    return [_LOADS[round(index * last / (num_loads - 1))] for index in range(num_loads)]
