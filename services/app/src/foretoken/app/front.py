"""The public front: services in this process or at an address, awaited or not.

`foretoken.open` and its neighbours are these functions.
"""

from collections.abc import Callable
from threading import RLock
from typing import Any

from foretoken.app.compose import Composition
from foretoken.app.config import SERVICES, AppConfig, process_environment
from foretoken.app.starter import with_starter
from foretoken.app.telemetry.spans import start_tracing
from foretoken.client.aio.facade import AsyncForetoken
from foretoken.client.facade import Foretoken, Target
from foretoken.domain.errors import InvalidRequestError


class EmbeddedForetoken(Foretoken):
    """A program that predicts waits for no simulator, nor needs the packages of a profiler."""

    def __init__(self, composition: Composition, on_close: Callable[[], None]) -> None:
        """Keep the composition, which is closed with this, and what is called behind it."""
        super().__init__()
        self._composition = composition
        self._on_close = on_close
        # Several threads may ask for a service that is not open yet.
        self._lock = RLock()

    def close(self) -> None:
        """Close the services that were opened, and connections."""
        with self._lock:
            self._composition.close()
            self._on_close()

    def _find_port(self, name: str) -> Any:
        """Return a service by its name, opened now if it is not."""
        with self._lock:
            return getattr(self._composition, name)


def open(home: str = "", *, config: AppConfig | None = None) -> Foretoken:  # noqa: A001 - `foretoken.open`
    """Return a `Foretoken` whose services run in this process, each opened when first used.

    They keep their files under `home` (empty: `~/.local/share/foretoken`, as the command line).
    What nobody measured there the starter catalog answers, if it is installed. `config` is a whole
    configuration instead, whose endpoints may name services elsewhere.
    """
    chosen = config or with_starter(AppConfig(home=home), process_environment())
    return EmbeddedForetoken(Composition(chosen), start_tracing(chosen.tracing, "python"))


def connect(
    address: Target | None = None,
    *,
    catalog: Target | None = None,
    predictor: Target | None = None,
    simulator: Target | None = None,
    profiler: Target | None = None,
) -> Foretoken:
    """Return a `Foretoken` that talks to services; nothing is sent before the first call.

    `address` is of a server of all services, as `foretoken serve` is; a service that is named goes
    to its own. A target is `HOST:PORT`, or `ChannelOptions` with TLS, a token or deadlines.

    Raises:
        InvalidRequestError: there is no address.

    """
    given = {
        "catalog": catalog,
        "predictor": predictor,
        "simulator": simulator,
        "profiler": profiler,
    }
    targets = {name: given[name] or address for name in SERVICES}
    if not any(targets.values()):
        raise InvalidRequestError.of_field("address", "say where the services are: HOST:PORT")
    return Foretoken.connect(**targets)


def open_async(home: str = "", *, config: AppConfig | None = None) -> AsyncForetoken:
    """Return what `open` does, each call to be awaited."""
    return AsyncForetoken(open(home, config=config))


def connect_async(
    address: Target | None = None,
    *,
    catalog: Target | None = None,
    predictor: Target | None = None,
    simulator: Target | None = None,
    profiler: Target | None = None,
) -> AsyncForetoken:
    """Return what `connect` does, each call to be awaited."""
    return AsyncForetoken(
        connect(
            address,
            catalog=catalog,
            predictor=predictor,
            simulator=simulator,
            profiler=profiler,
        )
    )
