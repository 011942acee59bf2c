"""`foretoken predict`: one operator's latency."""

from typing import Annotated

import typer

from foretoken.app.cli.state import build_table, open_composition, parse_assignments, state_of
from foretoken.client.facade import CallOptions
from foretoken.domain.errors import InvalidRequestError


def predict(
    context: typer.Context,
    operator: Annotated[str, typer.Argument(help="Operator: see `foretoken list operators`.")],
    dims: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=VALUE...",
            help="Its dimensions; also `dtype=`, `phase=backward`, `framework=vllm`.",
        ),
    ],
    device: Annotated[str, typer.Option(help="Device: see `foretoken list devices`.")],
    topology: Annotated[str, typer.Option(help="Topology, for collectives.")] = "",
    refuse_extrapolation: Annotated[
        bool, typer.Option("--refuse-extrapolation", help="Fail rather than extrapolate.")
    ] = False,
) -> None:
    """Estimate how long one operator takes, with a 90 % interval and what it rests on.

    Example: `foretoken predict gemm m=1024 n=4096 k=4096 dtype=bf16 --device a30`
    """
    state = state_of(context)
    with open_composition(state) as services:
        words = dict(parse_assignments(dims))
        options = CallOptions(
            topology=topology,
            framework=words.pop("framework", ""),
            refuse_extrapolation=refuse_extrapolation,
        )
        estimate = services.foretoken("predictor").predict(
            operator,
            device=device,
            dtype=words.pop("dtype", "bf16"),
            phase=words.pop("phase", "forward"),
            options=options,
            **{name: _whole(name, value) for name, value in words.items()},
        )
        columns = ("latency (µs)", "low (µs)", "high (µs)", "provenance", "model version")
        row = (
            estimate.latency_us,
            estimate.low_us,
            estimate.high_us,
            estimate.provenance.name.lower(),
            estimate.model_version,
        )
        title = f"{operator} on {device}"
        state.print_object(estimate, lambda: build_table(title, columns, [row]))


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as err:
        raise InvalidRequestError.of_field(name, f"expected a whole number, got {text!r}") from err
