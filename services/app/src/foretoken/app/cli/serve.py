"""`foretoken serve` and `foretoken ui`: run services, and their pages, in this process."""

import webbrowser
from dataclasses import replace
from typing import Annotated

import typer

from foretoken.app.cli.state import state_of
from foretoken.app.config import SERVICES

_WEB = "web"
_HTTP_PORT = 8080


def serve(
    context: typer.Context,
    services: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Which: {', '.join(SERVICES)}. None named: all in one process. `web`: the pages"
            " of services elsewhere, without gRPC."
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="gRPC port; 0 takes a free one.")] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Prometheus port; -1 serves none. `web` alone serves none unless given."),
    ] = None,
    http: Annotated[
        int | None,
        typer.Option(help="Port of pages and of calls as JSON; 0: a free one, -1: none."),
    ] = None,
) -> None:
    """Serve over gRPC with health, reflection and Prometheus metrics, until SIGTERM or Ctrl-C.

    Services not named here are found by the endpoints in the configuration:
    `foretoken --endpoint catalog=dns:///catalog:50051 serve predictor`
    """
    # Metrics, health and reflection, which no other command needs.
    from foretoken.app.serve import serve_until_stopped, serve_web_until_stopped

    state = state_of(context)
    is_web_alone = services == [_WEB]
    if is_web_alone and http is None and state.config.server.http_port < 0:
        http = _HTTP_PORT
    given = {"host": host, "port": port, "metrics_port": metrics_port, "http_port": http}
    overrides = {key: value for key, value in given.items() if value is not None}

    server = replace(state.config.server, **overrides)  # type: ignore[arg-type]
    config = replace(state.config, server=server)
    if is_web_alone:
        # By default only services have one: pages may share a machine with them.
        serve_web_until_stopped(
            config,
            lambda address: typer.echo(f"serving {address}"),
            has_metrics=metrics_port is not None,
        )
        return

    def announce(bound_port: int) -> None:
        typer.echo(f"serving {server.host}:{bound_port}")

    serve_until_stopped(tuple(dict.fromkeys(services or SERVICES)), config, announce)


def ui(
    context: typer.Context,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    http: Annotated[int, typer.Option(help="Port of the pages; 0 takes a free one.")] = _HTTP_PORT,
    has_browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the pages in the browser.")
    ] = True,
) -> None:
    """Ask, look, compare and share in the browser: every service in one process, and its pages."""
    from foretoken.app.serve import serve_web_until_stopped

    state = state_of(context)

    def announce(address: str) -> None:
        typer.echo(f"serving {address}")
        if has_browser:
            webbrowser.open(address)

    server = replace(state.config.server, host=host or state.config.server.host, http_port=http)
    serve_web_until_stopped(replace(state.config, server=server), announce)
