"""Simulators in folders of their own, with one worker for searches unless `settings` say more."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretoken.domain.ports import CatalogPort, PredictorPort
from foretoken.predictor.config import PredictorConfig
from foretoken.predictor.service import PredictorService
from foretoken.simulator.config import SimulatorConfig
from foretoken.simulator.service import SimulatorService


def open_simulator(folder: Path, predictor: PredictorPort, **settings: Any) -> SimulatorService:
    """Return a simulator that is open; the caller closes it."""
    said = {"state_folder": str(folder), "num_search_workers": 1, **settings}
    service = SimulatorService(SimulatorConfig(**said), predictor)
    service.open()
    return service


@contextmanager
def untrained_simulator(
    folder: Path, catalog: CatalogPort, **settings: Any
) -> Iterator[SimulatorService]:
    """A simulator whose predictor answers from the devices' physical limits."""
    predictor = PredictorService(PredictorConfig(state_folder=str(folder / "p")), catalog)
    predictor.open()
    service = open_simulator(folder / "s", predictor, **settings)
    yield service
    service.close()
    predictor.close()
