"""A home of the embedded services, as the second command of somebody finds it."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def home_path(tmp_path: Path, make_catalog_path: Callable[[Path], str]) -> str:
    """A home whose catalog has its tables."""
    return str(Path(make_catalog_path(tmp_path / "home")).parent)
