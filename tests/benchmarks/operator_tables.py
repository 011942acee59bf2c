"""What benchmarks of steps rest on: a new installation's operators, and all that a user imports."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training_tables import record_files

import foretoken
from foretoken.catalog.importing import ImportRequest
from foretoken.client.facade import Foretoken

WHOLE, STARTER = "whole import", "starter"


@contextmanager
def open_tables(name: str, data: Path, home: str = "") -> Iterator[Foretoken]:
    """Open services that have the starter alone, or NVIDIA's whole database as well.

    The whole import is that of `home`; where there is none it is made from `data`, which takes
    minutes, and kept where `home` names a folder.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(home or scratch) if name == WHOLE else Path(scratch)
        is_new = not (folder / "catalog.duckdb").exists()
        with foretoken.open(str(folder)) as services:
            if is_new and name == WHOLE:
                systems = data / "aiconfigurator" / "systems"
                record_files(services.catalog, "aiconfigurator", ImportRequest(path=systems))
            yield services
