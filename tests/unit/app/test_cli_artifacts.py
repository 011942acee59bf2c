"""`foretoken catalog artifacts` lists what the catalog keeps for other services."""

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretoken.app.cli.main import app
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.artifact import Artifact

_HASH = hashlib.sha256(b"content").hexdigest()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose catalog keeps a file of each of two kinds, one active."""
    service = CatalogService(CatalogConfig(path=str(tmp_path / "catalog.duckdb"), num_threads=1))
    service.open()
    for kind in ("latency_models", "corrections"):
        artifact = Artifact(
            kind=kind,
            name="v1",
            content_hash=_HASH,
            num_bytes=7,
            created_at="2026-01-02T03:04:05Z",
        )
        service.store_artifact(artifact, [b"content"])
    service.activate_artifact("latency_models", "v1")
    service.close()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ((), ["corrections", "latency_models"]),
        (("latency_models",), ["latency_models"]),
        (("none",), []),
    ],
)
def test_all_kinds_or_one_are_listed(words: tuple[str, ...], kinds: list[str], home: Path) -> None:
    command = ["--home", str(home), "--output", "json", "catalog", "artifacts", *words]
    outcome = CliRunner().invoke(app, command, catch_exceptions=False)
    expected = [
        {
            "name": "v1",
            "kind": kind,
            "bytes": 7,
            "created": "2026-01-02T03:04:05Z",
            "active": kind == "latency_models",
            "content": _HASH,
        }
        for kind in kinds
    ]
    assert expected == json.loads(outcome.stdout)
