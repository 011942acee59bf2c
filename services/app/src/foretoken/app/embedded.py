"""A `Foretoken` over the services of this process, each opened when it is first used."""

from threading import RLock
from typing import TYPE_CHECKING

from foretoken.client.facade import Foretoken

if TYPE_CHECKING:
    from foretoken.app.compose import Composition
    from foretoken.domain.ports import CatalogAdminPort, PredictorPort, ProfilerPort, SimulatorPort


class EmbeddedForetoken(Foretoken):
    """A program that predicts waits for no simulator, nor needs the packages of a profiler."""

    def __init__(self, composition: "Composition") -> None:
        """Keep the composition, which is closed with this."""
        super().__init__()
        self._composition = composition
        # Several threads may ask for a service that is not open yet.
        self._lock = RLock()

    def close(self) -> None:
        """Close the services that were opened, and connections."""
        with self._lock:
            self._composition.close()

    @property
    def catalog(self) -> "CatalogAdminPort":
        """The catalog."""
        with self._lock:
            return self._composition.catalog

    @property
    def profiler(self) -> "ProfilerPort":
        """The profiler."""
        with self._lock:
            return self._composition.profiler

    @property
    def predictor(self) -> "PredictorPort":
        """The predictor."""
        with self._lock:
            return self._composition.predictor

    @property
    def simulator(self) -> "SimulatorPort":
        """The simulator."""
        with self._lock:
            return self._composition.simulator
