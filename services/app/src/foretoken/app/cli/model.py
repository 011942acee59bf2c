"""`foretoken model`: what a model is, in figures."""

from typing import Annotated

import typer
from rich.table import Table

from foretoken.app.cli.state import build_table, stack, state_of
from foretoken.domain.models.checkpoint_files import checkpoint_bytes
from foretoken.domain.models.description import ModelFigures, PartFigures, describe_model
from foretoken.domain.models.load import find_folder, load_model
from foretoken.domain.units import GIB

_GIGA, _MIB = 1e9, 1 << 20
_NONE = "-"
_LEAST = 0.01


def model(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="A preset, a `config.json`, its folder, or a GGUF file.")
    ],
) -> None:
    """Show a model: layers by kind, parameters, bytes as stored, and what a request keeps."""
    folder = find_folder(name)
    figures = describe_model(load_model(name), checkpoint_bytes(folder) if folder else 0)
    state_of(context).print_object(figures, lambda: _table(figures))


def _table(figures: ModelFigures) -> Table:
    """Return what each part takes, then its sizes, then all together."""
    columns = {
        "part": [part.part for part in figures.parts],
        "layers": [f"{part.num_layers}" for part in figures.parts],
        "total (1e9)": [_in_units(part.num_parameters, _GIGA) for part in figures.parts],
        "active (1e9)": [_in_units(part.num_active, _GIGA) for part in figures.parts],
        "GiB": [_in_units(part.num_bytes, GIB) for part in figures.parts],
        "weights": [_weights(part) for part in figures.parts],
        "KV bytes a token": [_count(part.token_bytes) for part in figures.parts],
        "in a window": [_count(part.window_bytes) for part in figures.parts],
        "state (MiB)": [_in_units(part.request_bytes, _MIB) for part in figures.parts],
    }
    shown = {name: cells for name, cells in columns.items() if set(cells) != {_NONE}}
    numbers = [place for place, name in enumerate(shown) if name not in ("part", "weights")]
    rows = list(zip(*shown.values(), strict=True))
    title = f"{figures.name}: {figures.num_layers} layers"
    title += f": {figures.pattern}" if figures.pattern else ""
    sizes = [(part.part, f"{part.num_layers}", part.sizes) for part in figures.parts if part.sizes]
    return stack(
        build_table(title, tuple(shown), rows, numbers),
        build_table("Sizes", ("part", "layers", "of each"), sizes, (1,)),
        *_caption(figures),
    )


def _weights(part: PartFigures) -> str:
    """Return how the matrices of a part are stored, by name where they are not stored alike."""
    named = part.stored.split(", ") if part.stored else ["all 16 bit"]
    bits = {text.split(" ", 1)[1] for text in named}
    return bits.pop() if len(bits) == 1 else ", ".join(named)


def _in_units(number: float, unit: float) -> str:
    """Return a number to two decimals; what is too small for them says so."""
    text = f"{number / unit:,.2f}"
    return f"<{_LEAST}" if 0 < number < _LEAST * unit / 2 else text if number else _NONE


def _count(number: float) -> str:
    return f"{number:,.0f}" if number else _NONE


def _caption(figures: ModelFigures) -> list[str]:
    active = (
        figures.num_active,
        figures.num_active_without_embedding,
        figures.num_active_in_layers,
    )
    whole, without, inside = (f"{number / _GIGA:,.2f}e9" for number in active)
    total, size = f"{figures.num_parameters / _GIGA:,.2f}e9", f"{figures.num_bytes / GIB:,.1f} GiB"
    is_alike = figures.checkpoint_bytes and not figures.difference
    alike = ", and its files hold as much to 1 %" if is_alike else ""
    token = f"{figures.token_bytes:,.0f} bytes a token"
    lines = [
        f"{total} parameters, encoders included, layers that predict further tokens not",
        f"active: {whole}; without the embedding {without}, without the head as well {inside}",
        f"{size} as stored{alike}; the KV cache in {figures.kv_dtype}: {token}",
    ]
    if figures.difference:
        lines.append(figures.difference)
    if figures.window_bytes:
        lines.append(f"windows of one request: {figures.window_bytes:,.0f} bytes at most")
    if figures.request_bytes:
        lines.append(f"recurrent states of one request: {figures.request_bytes:,.0f} bytes")
    return [*lines, *(f"approximated: {text}" for text in figures.approximations)]
