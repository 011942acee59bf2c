"""`foretoken serve`: run services in this process."""

from dataclasses import replace
from typing import Annotated

import typer

from foretoken.app.cli.state import fail, state_of
from foretoken.app.config import SERVICES
from foretoken.domain.errors import ForetokenError


def serve(
    context: typer.Context,
    services: Annotated[
        list[str] | None,
        typer.Argument(help=f"Which: {', '.join(SERVICES)}. None named: all in one process."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="gRPC port; 0 takes a free one.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Prometheus port; -1 serves none.")
    ] = None,
) -> None:
    """Serve over gRPC with health, reflection and Prometheus metrics, until SIGTERM or Ctrl-C.

    Services not named here are found by the endpoints in the configuration:
    `foretoken --endpoint catalog=dns:///catalog:50051 serve predictor`
    """
    # Metrics, health and reflection, which no other command needs.
    from foretoken.app.serve import serve_until_stopped

    state = state_of(context)
    given = {"host": host, "port": port, "metrics_port": metrics_port}
    overrides = {key: value for key, value in given.items() if value is not None}

    try:
        server = replace(state.config.server, **overrides)  # type: ignore[arg-type]
        config = replace(state.config, server=server)

        def announce(bound_port: int) -> None:
            typer.echo(f"serving {server.host}:{bound_port}")

        serve_until_stopped(tuple(dict.fromkeys(services or SERVICES)), config, announce)
    except ForetokenError as err:
        fail(err)
