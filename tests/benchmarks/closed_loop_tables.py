"""NVIDIA's H200 tables as a user has them: the whole import, on top of the starter."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig
from foretoken.app.starter import with_starter
from foretoken.catalog.importing import ImportRequest, find_importer

TRAINED_ON = "h200_sxm"
# The tables under which experts see few tokens as real routers send them.
ROUTING = "power_law_1.01"


@contextmanager
def open_whole_import(data: Path, home: Path | None) -> Iterator[Composition]:
    """Open services on a home with H200's tables, imported where there is none yet.

    Without a home it is one for this run only. Series are learned when they are asked for.
    """
    with tempfile.TemporaryDirectory() as scratch:
        place = home or Path(scratch) / "home"
        is_imported = place.exists()
        with Composition(with_starter(AppConfig(home=str(place)), {})) as services:
            if not is_imported:
                systems = ImportRequest(path=data / "aiconfigurator" / "systems", device=TRAINED_ON)
                plan = find_importer("aiconfigurator").read(systems)
                list(services.catalog.record(plan.run, plan.batches))
            yield services
