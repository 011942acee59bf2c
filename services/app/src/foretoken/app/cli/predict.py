"""`foretoken predict`: one operator's latency, and why it is what it is."""

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.table import Table

from foretoken.app.cli.call_words import order_dims, parse_whole, split_words
from foretoken.app.cli.stack import stack
from foretoken.app.cli.state import build_table, format_cell, open_composition, state_of
from foretoken.client.single_query import CallOptions, build_single_query
from foretoken.domain.alias import canonical_device
from foretoken.domain.measurements.estimate import (
    LatencyEstimate,
    LatencyQuery,
    Provenance,
    pick_estimate,
)
from foretoken.domain.measurements.explanation import Explanation
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.results.echo import Echo

# Beside number format and phase, the words that are no dimensions.
_OPTIONS = ("variant", "kernel", "framework", "model_version", "correction")

_Section = tuple[str, tuple[str, ...], list[tuple[object, ...]]]


_DEVICE = typer.Option(help="Device: see `foretoken list devices`.", callback=canonical_device)


def predict(  # noqa: PLR0913, PLR0917 - the parameters are the command's options
    context: typer.Context,
    operator: Annotated[str, typer.Argument(help="Operator: see `foretoken list operators`.")],
    dims: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=VALUE...",
            help="Its dimensions; also `dtype=`, `phase=backward`, `variant=quant=fp8_block`,"
            " `kernel=flashinfer`, `framework=vllm`, `model_version=`, `correction=`.",
        ),
    ],
    device: Annotated[str, _DEVICE],
    topology: Annotated[str, typer.Option(help="Topology, for collectives.")] = "",
    refuse_extrapolation: Annotated[
        bool, typer.Option("--refuse-extrapolation", help="Fail rather than extrapolate.")
    ] = False,
    as_measured: Annotated[
        bool,
        typer.Option("--as-measured", help="A measured point is its measurement, no model in it."),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the limits, models and points behind it.")
    ] = False,
) -> None:
    """Estimate how long one operator takes, with a 90 % interval and what it rests on.

    Example: `foretoken predict gemm m=1024 n=4096 k=4096 dtype=bf16 --device a30 --explain`
    """
    state = state_of(context)
    with open_composition(state) as services:
        said, sizes = split_words(dims, ("dtype", "phase", *_OPTIONS))
        query = build_single_query(
            operator,
            {name: parse_whole(name, value) for name, value in sizes.items()},
            device=device,
            dtype=said.get("dtype", "bf16"),
            phase=said.get("phase", "forward"),
            options=CallOptions(
                topology=topology,
                refuse_extrapolation=refuse_extrapolation,
                prefer_measured=as_measured,
                **{name: said[name] for name in _OPTIONS if name in said},
            ),
        )
        if explain:
            explanation = services.predictor.explain(query)
            state.print_object(
                explanation,
                lambda: _explanation_table(operator, device, explanation),
                _echo(query, explanation.estimate),
            )
        else:
            estimate = pick_estimate(services.predictor.predict(query))
            state.print_object(
                estimate,
                lambda: _estimate_table(operator, device, estimate),
                _echo(query, estimate),
            )


def _echo(query: LatencyQuery, estimate: LatencyEstimate) -> Echo:
    """Return the question of a call as it was understood, and what would measure it."""
    (table,) = query.tables
    sizes = {name: int(column[0]) for name, column in table.columns.items()}
    dims = " ".join(f"{name}={value}" for name, value in order_dims(table.operator, sizes).items())
    how = (table.dtype.name.lower(), table.phase.name.lower(), table.variant, table.kernel)
    place = f"{query.device}, {query.topology}" if query.topology else query.device
    question = f"{table.operator} {dims} in {' '.join(word for word in how if word)} on {place}"
    share = {estimate.provenance.name.lower(): 1.0}
    if estimate.provenance is Provenance.MEASURED:
        return Echo(question=question, time_ratio_by_provenance=share)
    command = "profile collectives" if find_operator(table.operator).is_collective else "profile"
    return Echo(
        question=question,
        time_ratio_by_provenance=share,
        narrowing=f"`foretoken {command} --device {query.device} --operator {table.operator}` where"
        " the device is; then `foretoken train`",
    )


def _estimate_table(operator: str, device: str, estimate: LatencyEstimate) -> Table:
    cells: dict[str, object] = {"latency (µs)": estimate.latency_us}
    if estimate.correction_factor != 1.0:
        cells["uncorrected (µs)"] = estimate.raw_latency_us
    cells |= {
        "low (µs)": estimate.low_us,
        "high (µs)": estimate.high_us,
        "provenance": estimate.provenance.name.lower(),
        "model version": estimate.model_version or "-",
    }
    table = build_table(f"{operator} on {device}", tuple(cells), [tuple(cells.values())])
    return stack(table, *_grounds(operator, estimate))


def _grounds(operator: str, estimate: LatencyEstimate) -> Iterator[str]:
    """Yield what an estimate rests on, line by line."""
    if estimate.basis:
        yield f"rests on {estimate.basis}"
    if estimate.nearest:
        dims = order_dims(operator, estimate.nearest)
        point = " ".join(f"{name}={value}" for name, value in dims.items())
        away = f"a factor {2**estimate.nearest_octaves:.4g} away"
        where = away if estimate.nearest_octaves else "this very point"
        yield f"nearest measurement: {format_cell(estimate.nearest_us)} µs at {point}, {where}"


def _explanation_table(operator: str, device: str, explanation: Explanation) -> Table:
    return stack(
        _estimate_table(operator, device, explanation.estimate),
        _limits_table(explanation),
        *(build_table(*section) for section in _sections(operator, explanation) if section[-1]),
    )


def _limits_table(explanation: Explanation) -> Table:
    limits = (explanation.floor_us, explanation.compute_us, explanation.memory_us)
    row = (*limits, f"{explanation.efficiency_ratio:.1%}", explanation.tier)
    columns = ("launch (µs)", "compute (µs)", "memory or links (µs)", "efficiency", "lies")
    return build_table("What the device allows", columns, [row])


def _sections(operator: str, explanation: Explanation) -> Iterator[_Section]:
    """Yield title, columns and rows of each list."""
    yield (
        "Ways of estimating",
        ("way", "says (µs)", "weight"),
        [(m.name, m.latency_us, f"{m.weight_ratio:.1%}") for m in explanation.members],
    )
    yield (
        "What moves the trees' answer",
        ("feature", "value", "factor"),
        [(c.feature, c.value, c.factor) for c in explanation.contributions],
    )
    points = [order_dims(operator, near.dims) for near in explanation.neighbours]
    yield (
        "Nearest measurements",
        (*(points[0] if points else ()), "took (µs)", "away (octaves)"),
        [
            (*point.values(), near.latency_us, near.distance_octaves)
            for point, near in zip(points, explanation.neighbours, strict=True)
        ],
    )
