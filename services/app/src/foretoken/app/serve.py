"""Serve one, some or all services from this process, and stop gracefully."""

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import REGISTRY, start_http_server
from prometheus_client.registry import Collector, CollectorRegistry

from foretoken.app.access import Access, is_open
from foretoken.app.admission import build_admission
from foretoken.app.call_guard import TimeLimits
from foretoken.app.compose import Composition
from foretoken.app.config import EMBEDDED, SERVICES, AppConfig, ServerConfig
from foretoken.app.observed_handler import ObservedCalls
from foretoken.app.request_metrics import RequestMetrics
from foretoken.app.server_credentials import build_credentials
from foretoken.app.service_metrics import (
    JobMetrics,
    LaneMetrics,
    ObservedPredictor,
    PredictorMetrics,
)
from foretoken.app.telemetry.call_log import OFF, CallLog
from foretoken.app.telemetry.spans import start_tracing
from foretoken.app.tokens import TokenCheck, Tokens
from foretoken.domain.errors import InvalidRequestError
from foretoken.jobs.service import RunsJobs
from foretoken.wire.keepalive import SERVER_OPTIONS, age_options

if TYPE_CHECKING:
    from foretoken.app.web.server import WebServer
    from foretoken.catalog.service import CatalogService

_SIGNAL_TICK_S = 0.5
# How long a thread that computes keeps the interpreter from others that wait for it. A call passes
# through some ten threads' hands, and would wait for each of them Python's own 5 ms.
_SWITCH_S = 0.0005
# A probe is the name of a service; few look at a time.
_LARGEST_PROBE_BYTES, _MAX_PROBES = 1024, 64

_log = logging.getLogger(__name__)


class HealthServicer(health.HealthServicer):
    """Health whose watchers may leave while it changes.

    grpcio's own waits, with its lock held, for a watcher to take an answer, while the one thread
    that could say the watcher has gone waits for that lock: clients and server that stop in the
    same moment would never end.
    """

    def _on_close_callback(
        self, send_response_callback: Callable[..., None], service: str
    ) -> Callable[[], None]:
        forget = super()._on_close_callback(send_response_callback, service)
        return lambda: threading.Thread(target=forget, daemon=True).start()


class RunningServer:
    """A gRPC server of some services, its health, and what to close behind it."""

    def __init__(
        self,
        server: grpc.Server,
        health_servicer: health.HealthServicer,
        closing: ExitStack,
        port: int,
    ) -> None:
        self._server = server
        self._health = health_servicer
        self._closing = closing
        self.port = port

    def stop(self, config: ServerConfig) -> None:
        """Report NOT_SERVING, give balancers time to move away, end calls, close services."""
        self._health.enter_graceful_shutdown()
        time.sleep(config.drain_s)
        self._server.stop(config.grace_s).wait()
        self._closing.close()


def start_server(names: Sequence[str], config: AppConfig) -> RunningServer:
    """Start serving the named services and return at once.

    A named service always runs in this process; the endpoints say where the others are.

    Raises:
        InvalidRequestError: an unknown service, or the address is taken.

    """
    unknown = ", ".join(sorted(set(names) - set(SERVICES)))
    if unknown:
        raise InvalidRequestError.of_field(
            "services", f"unknown: {unknown}; known are {', '.join(SERVICES)}"
        )
    endpoints = replace(config.endpoints, **dict.fromkeys(names, EMBEDDED))
    # What was left unfinished goes on: this process stays.
    simulator = {"resumes_at_start": True, **config.simulator}
    config = replace(config, endpoints=endpoints, simulator=simulator)
    composition = Composition(config, joins_owner=False)
    with ExitStack() as undo:
        undo.callback(composition.close)
        server = new_server(config.server, REGISTRY, undo, logged_calls=config.log.calls)
        health_servicer = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        full_names = [_register(name, server, composition) for name in names]
        for name in names:
            for metrics in _observe(name, composition):
                REGISTRY.register(metrics)
                undo.callback(REGISTRY.unregister, metrics)
        if "predictor" in names:
            _warm_up(composition)
        reflection.enable_server_reflection(
            (*full_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        port = _bind(server, config.server)
        if config.server.health_port >= 0:
            undo.callback(_serve_health(config.server, health_servicer))
        if config.server.http_port >= 0:
            offered = [name for name in SERVICES if name in names or _is_elsewhere(name, config)]
            undo.callback(serve_web(config, tuple(offered), composition, REGISTRY).close)
        closing = undo.pop_all()
    server.start()
    for full_name in (*full_names, ""):
        health_servicer.set(full_name, health_pb2.HealthCheckResponse.SERVING)
    return RunningServer(server, health_servicer, closing, port)


def new_server(
    config: ServerConfig,
    registry: CollectorRegistry,
    closing: ExitStack,
    *,
    logged_calls: str = OFF,
) -> grpc.Server:
    """Return a server without services, which counts, checks and admits the calls of any.

    What is to be closed behind it is added to `closing`. `logged_calls` is which have a line.

    Raises:
        InvalidRequestError: the file of the token cannot be read, a budget is of no method, or a
            caller has a role that there is not.

    """
    metrics = RequestMetrics(registry)
    closing.callback(metrics.close)
    limits = TimeLimits()
    limits.open()
    closing.callback(limits.close)
    tokens = Tokens.of(config)
    admission = build_admission(config, Access.of(config, tokens), limits, metrics)
    closing.callback(admission.close)
    lanes = LaneMetrics(admission.lanes)
    registry.register(lanes)
    closing.callback(registry.unregister, lanes)
    observed = ObservedCalls(CallLog(logged_calls).observe_call, metrics.observe_call)
    interceptors: list[grpc.ServerInterceptor] = [observed]  # type: ignore[type-arg]
    if tokens is not None:
        interceptors.append(TokenCheck(tokens, is_open))
    interceptors.append(admission)
    return grpc.server(
        # For what is refused without a token; what is admitted has threads of its own.
        ThreadPoolExecutor(1, thread_name_prefix="grpc"),
        interceptors=interceptors,
        options=(
            *SERVER_OPTIONS,
            *age_options(config.max_connection_age_s, config.connection_grace_s),
            # Two servers on one port would each get some of the calls.
            ("grpc.so_reuseport", 0),
        ),
    )


def serve_catalog_at(address: str, catalog: "CatalogService", grace_s: float) -> ExitStack:
    """Serve a catalog to other processes of its user, and return what ends that.

    Raises:
        InvalidRequestError: nothing can listen there.

    """
    from foretoken.catalog import servicer

    with ExitStack() as undo:
        server = new_server(ServerConfig(), CollectorRegistry(), undo)
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
        servicer.register(server, catalog)
        try:
            server.add_insecure_port(address)
        except RuntimeError as err:
            raise InvalidRequestError(f"cannot listen on {address}") from err
        server.start()
        undo.callback(lambda: server.stop(grace_s).wait())
        return undo.pop_all()


def serve_web(
    config: AppConfig,
    offered: tuple[str, ...],
    ports: Composition,
    registry: CollectorRegistry | None = None,
) -> "WebServer":
    """Serve pages and calls over HTTP for the services that are offered, and return at once.

    Requests are counted in a registry, if one is given.

    Raises:
        InvalidRequestError: the address is taken.

    """
    # What no process without it waits for.
    from foretoken.app.web.calls import OfferedServices
    from foretoken.app.web.server import WebServer

    return WebServer(
        config.server,
        OfferedServices(offered, ports, config.starter),
        logged_calls=config.log.calls,
        registry=registry,
    ).open()


def serve_web_until_stopped(
    config: AppConfig, announce: Callable[[str], None], *, has_metrics: bool = False
) -> None:
    """Serve HTTP alone for all services, which run here or elsewhere, until SIGTERM or SIGINT.

    A profiler is offered where one could run. `announce` is called with the address.
    """
    wait = _catch_signals()
    sys.setswitchinterval(_SWITCH_S)
    offered = [
        name
        for name in SERVICES
        if name != "profiler" or _is_elsewhere(name, config) or find_spec("torch")
    ]
    simulator = {"resumes_at_start": True, **config.simulator}
    with ExitStack() as closing:
        if has_metrics:
            closing.callback(_serve_metrics(config.server))
        closing.callback(start_tracing(config.tracing, "web"))
        composition = closing.enter_context(Composition(replace(config, simulator=simulator)))
        server = serve_web(config, tuple(offered), composition, REGISTRY)
        try:
            announce(server.address)
            # The first question should find what answers it open.
            server.offered.port("simulator")
            _warm_up(composition)
            wait()
        finally:
            server.close()


def _is_elsewhere(name: str, config: AppConfig) -> bool:
    return bool(getattr(config.endpoints, name) != EMBEDDED)


def serve_until_stopped(
    names: Sequence[str], config: AppConfig, announce: Callable[[int], None]
) -> None:
    """Serve until SIGTERM or SIGINT, then stop gracefully. `announce` is called with the port."""
    wait = _catch_signals()
    sys.setswitchinterval(_SWITCH_S)
    # First, for it fails at once where the port is taken.
    stop_metrics = _serve_metrics(config.server)
    stop_tracing = start_tracing(config.tracing, "-".join(names))
    running = start_server(names, config)
    _log.info(
        "serving services=%s address=%s:%d", ",".join(names), config.server.host, running.port
    )
    announce(running.port)
    wait()
    running.stop(config.server)
    stop_metrics()
    stop_tracing()
    _log.info("stopped")


def _catch_signals() -> Callable[[], None]:
    """Return what waits for SIGTERM or SIGINT, which count from now on."""
    stopped = threading.Event()

    def ask_to_stop(signal_number: int, _frame: FrameType | None) -> None:
        _log.info("stopping signal=%s", signal.Signals(signal_number).name)
        stopped.set()

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, ask_to_stop)

    def wait() -> None:
        # A signal just before a wait is handled when the wait is over: none may be without end.
        while not stopped.wait(_SIGNAL_TICK_S):
            pass

    return wait


def _serve_metrics(config: ServerConfig) -> Callable[[], None]:
    """Serve Prometheus metrics next to gRPC, and return what stops it."""
    if config.metrics_port < 0:
        return lambda: None
    try:
        server, _ = start_http_server(config.metrics_port, config.metrics_host)
    except OSError as err:
        raise InvalidRequestError.of_field(
            "server.metrics_port",
            f"cannot listen on {config.metrics_host}:{config.metrics_port}: {err.strerror};"
            " choose another with --metrics-port, or -1 for none",
        ) from err
    return server.shutdown


def _serve_health(config: ServerConfig, servicer: HealthServicer) -> Callable[[], object]:
    """Answer for the health and nothing else, in the clear, and return what stops it."""
    server = grpc.server(
        ThreadPoolExecutor(1, thread_name_prefix="health"),
        options=(
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", _LARGEST_PROBE_BYTES),
        ),
        maximum_concurrent_rpcs=_MAX_PROBES,
    )
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"{config.host}:{config.health_port}"
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as err:
        raise InvalidRequestError.of_field(
            "server.health_port", f"cannot listen on {address}; choose another, or -1 for none"
        ) from err
    server.start()
    _log.info("serving health address=%s:%d", config.host, port)
    return lambda: server.stop(None).wait()


def _register(name: str, server: grpc.Server, composition: Composition) -> str:
    """Let the server answer for a service of this process, and return its full name."""
    servicer: Any = import_module(f"foretoken.{name}.servicer")
    servicer.register(server, getattr(composition, name))
    return str(servicer.SERVICE_NAME)


def _observe(name: str, composition: Composition) -> Iterator[Collector]:
    """Yield the metrics of a service of this process."""
    port = getattr(composition, name)
    if isinstance(port, RunsJobs):
        yield JobMetrics(name, port)
    if name == "catalog":
        from foretoken.app.service_metrics import CatalogMetrics
        from foretoken.catalog.service import CatalogService

        if isinstance(port, CatalogService):
            yield CatalogMetrics(port)
    if name == "predictor" and isinstance(port, ObservedPredictor):
        yield PredictorMetrics(port)
    if name == "simulator":
        from foretoken.app.service_metrics import SimulatorMetrics
        from foretoken.simulator.service import SimulatorService

        if isinstance(port, SimulatorService):
            yield SimulatorMetrics(port)


def _warm_up(composition: Composition) -> None:
    """Let this process's predictor compile what it needs, in the background."""
    from foretoken.predictor.service import PredictorService

    predictor = vars(composition).get("predictor")
    if isinstance(predictor, PredictorService):
        threading.Thread(target=predictor.warm_up, name="warm up", daemon=True).start()


def _bind(server: grpc.Server, config: ServerConfig) -> int:
    address = f"{config.host}:{config.port}"
    try:
        if config.tls_certificate_file:
            port = server.add_secure_port(address, build_credentials(config))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as err:
        hint = "; are the TLS files PEM, the key the certificate's?" if config.tls_key_file else ""
        raise InvalidRequestError.of_field(
            "server.port", f"cannot listen on {address}{hint}"
        ) from err
    return int(port)
