"""Which colour stands for what in the figures of a simulation."""

from collections.abc import Mapping, Sequence

from foretoken.page.figure import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW

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
    "transferred": PURPLE,
    "analytical": GREY,
}

OF_MEMORY: Mapping[str, str] = {
    "weights": BLUE,
    "gradients": SKY,
    "optimizer": GREEN,
    "activations": ORANGE,
    "temporary": PURPLE,
}

OF_SERVING_MEMORY: Mapping[str, str] = {
    "weights": BLUE,
    "KV cache": GREEN,
    "activations": ORANGE,
    "graphs": PURPLE,
    "reserved": GREY,
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
