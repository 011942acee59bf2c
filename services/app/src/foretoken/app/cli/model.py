"""`foretoken model`: what a model is, in figures."""

from typing import Annotated

import typer
from rich.table import Table

from foretoken.app.cli.state import build_table, state_of
from foretoken.domain.models.description import ModelFigures, describe_model
from foretoken.domain.models.load import load_model
from foretoken.domain.units import GIB

_GIGA = 1e9
_COLUMNS = (
    "part",
    "layers",
    "parameters (1e9)",
    "active (1e9)",
    "GiB",
    "stored",
    "bytes a token",
    "bytes a token in the window",
    "bytes a request",
    "sizes",
)


def model(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A preset, a `config.json`, or the folder of one.")],
) -> None:
    """Show a model: layers by kind, parameters, bytes as stored, and what a request keeps."""
    figures = describe_model(load_model(name))
    state_of(context).print_object(figures, lambda: _table(figures))


def _table(figures: ModelFigures) -> Table:
    rows = [
        (
            part.part,
            part.num_layers,
            part.num_parameters / _GIGA,
            part.num_active / _GIGA,
            part.num_bytes / GIB,
            part.stored or "16 bit",
            part.token_bytes,
            part.window_bytes,
            part.request_bytes,
            part.sizes,
        )
        for part in figures.parts
    ]
    layers = f"{figures.num_layers} layers"
    table = build_table(
        f"{figures.name}: {layers}: {figures.pattern}"
        if figures.pattern
        else f"{figures.name}: {layers}",
        _COLUMNS,
        rows,
    )
    table.caption, table.caption_justify = "\n".join(_caption(figures)), "left"
    return table


def _caption(figures: ModelFigures) -> list[str]:
    active = (
        figures.num_active,
        figures.num_active_without_embedding,
        figures.num_active_in_layers,
    )
    whole, without, inside = (f"{number / _GIGA:,.2f}e9" for number in active)
    total, size = f"{figures.num_parameters / _GIGA:,.2f}e9", f"{figures.num_bytes / GIB:,.1f} GiB"
    token = f"{figures.token_bytes:,.0f} bytes a token"
    lines = [
        f"{total} parameters, encoders included, layers that predict further tokens not",
        f"active: {whole}; without the embedding {without}, without the head as well {inside}",
        f"{size} as stored; the KV cache in {figures.kv_dtype}: {token}",
    ]
    if figures.window_bytes:
        lines.append(f"windows of one request: {figures.window_bytes:,.0f} bytes at most")
    if figures.request_bytes:
        lines.append(f"recurrent states of one request: {figures.request_bytes:,.0f} bytes")
    return [*lines, *(f"approximated: {text}" for text in figures.approximations)]
