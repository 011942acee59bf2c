"""The catalog keeps files for other services alike whether it is embedded or remote."""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contract_artifacts import KIND, LARGE, SMALL, make_artifact
from contract_reach import Reach

from foretoken.catalog import servicer
from foretoken.catalog.config import CatalogConfig
from foretoken.catalog.service import CatalogService
from foretoken.client.services import CatalogClient
from foretoken.domain.errors import (
    ArtifactInUseError,
    InvalidRequestError,
    UnknownArtifactError,
)
from foretoken.domain.measurements.measurement import Artifact
from foretoken.domain.ports import CatalogPort

MAX_ARTIFACT_BYTES = 6 * 2**20


@contextmanager
def _reached(path: str, reach: Reach) -> Iterator[CatalogPort]:
    config = CatalogConfig(path=path, num_threads=1, max_artifact_bytes=MAX_ARTIFACT_BYTES)
    service = CatalogService(config)
    service.open()
    yield reach(service, servicer.register, CatalogClient.connect)
    service.close()


@pytest.fixture
def port(catalog_path: str, reach: Reach) -> Iterator[CatalogPort]:
    with _reached(catalog_path, reach) as port:
        yield port


@pytest.fixture(scope="module")
def empty(
    tmp_path_factory: pytest.TempPathFactory,
    make_catalog_path: Callable[[Path], str],
    shared_reach: Reach,
) -> Iterator[CatalogPort]:
    """What keeps nothing, whatever is sent to it."""
    with _reached(make_catalog_path(tmp_path_factory.mktemp("empty")), shared_reach) as port:
        yield port


def _read(port: CatalogPort, name: str) -> bytes:
    return b"".join(port.read_artifact(KIND, name))


def _store(port: CatalogPort, name: str, content: bytes, **changes: Any) -> Artifact:
    return port.store_artifact(make_artifact(name, content, **changes), [content])


@pytest.mark.parametrize("content", [b"", SMALL, LARGE], ids=["empty", "small", "large"])
def test_what_was_stored_is_read(content: bytes, port: CatalogPort) -> None:
    assert make_artifact("v1", content) == _store(port, "v1", content)
    assert content == _read(port, "v1")
    assert (make_artifact("v1", content),) == port.list_artifacts(KIND)


def test_content_comes_in_pieces_of_2_mib_at_most(port: CatalogPort) -> None:
    """However large those are that it was stored in."""
    _store(port, "v1", LARGE)
    sizes = [len(piece) for piece in port.read_artifact(KIND, "v1")]
    assert (len(LARGE), 2 * 2**20) == (sum(sizes), max(sizes))


def test_the_same_again_changes_nothing(port: CatalogPort) -> None:
    stored = _store(port, "v1", SMALL)
    assert stored == _store(port, "v1", SMALL, created_at="2027-01-01T00:00:00Z")
    assert (stored,) == port.list_artifacts(KIND)


def test_another_content_replaces_what_was_and_stays_as_active_as_that(port: CatalogPort) -> None:
    _store(port, "v1", LARGE)
    port.activate_artifact(KIND, "v1")
    expected = make_artifact("v1", SMALL, is_active=True)
    assert expected == _store(port, "v1", SMALL)
    assert (expected,) == port.list_artifacts(KIND)
    assert SMALL == _read(port, "v1")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"content_hash": hashlib.sha256(b"other").hexdigest()}, "content_hash: is .* content's"),
        ({"num_bytes": len(LARGE) - 1}, "num_bytes: .* more content"),
        ({"num_bytes": len(LARGE) + 1}, "num_bytes: .* the content ends at 5242883"),
        ({"num_bytes": MAX_ARTIFACT_BYTES + 1}, "num_bytes: .* up to 6291456 bytes"),
        ({"num_bytes": -1}, "num_bytes: must not be negative"),
        ({"content_hash": "abc"}, "content_hash: is the content's SHA-256"),
        ({"kind": ""}, "kind: '' is no name"),
        ({"name": ""}, "name: '' is no name"),
        ({"name": "/abs/dir"}, "name: '/abs/dir' is no name"),
        ({"kind": "a/../b"}, "kind: 'a/../b' is no name"),
        ({"metadata_json": "{"}, "metadata_json: is not JSON"),
        ({"created_at": "yesterday"}, "created_at: is not ISO 8601"),
        ({"created_at": "2026-01-02T03:04:05+02:00"}, "created_at: .* is not in UTC"),
    ],
)
def test_what_cannot_be_right_is_refused_and_leaves_nothing(
    changes: dict[str, Any], said: str, empty: CatalogPort
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        empty.store_artifact(replace(make_artifact("v1", LARGE), **changes), [LARGE])
    assert () == empty.list_artifacts(KIND)


def test_a_refused_content_leaves_what_was_there(port: CatalogPort) -> None:
    stored = _store(port, "v1", SMALL)
    with pytest.raises(InvalidRequestError):
        port.store_artifact(make_artifact("v1", LARGE), [LARGE[:-1] + b"!"])
    assert (stored,) == port.list_artifacts(KIND)
    assert SMALL == _read(port, "v1")


def test_an_error_of_the_sender_reaches_the_sender_and_leaves_nothing(port: CatalogPort) -> None:
    def read() -> Iterator[bytes]:
        yield LARGE[: 2**20]
        raise OSError("the file ended early")

    with pytest.raises(OSError, match="the file ended early"):
        port.store_artifact(make_artifact("v1", LARGE), read())
    assert () == port.list_artifacts(KIND)


@pytest.mark.slow
def test_the_newest_comes_first(port: CatalogPort) -> None:
    """Over more than one page of an answer."""
    names = [f"v{number:03}" for number in range(101)]
    for number, name in enumerate(names):
        _store(port, name, b"", created_at=f"2026-01-02T03:{number // 60:02}:{number % 60:02}Z")
    assert names[::-1] == [artifact.name for artifact in port.list_artifacts(KIND)]


def test_kinds_are_apart(port: CatalogPort) -> None:
    first = _store(port, "v1", SMALL)
    other = _store(port, "v1", LARGE, kind="corrections")
    port.activate_artifact(KIND, "v1")
    assert (replace(first, is_active=True),) == port.list_artifacts(KIND)
    assert (other,) == port.list_artifacts("corrections")
    assert () == port.list_artifacts("nothing")


def test_one_of_a_kind_is_active(port: CatalogPort) -> None:
    for name in ("v1", "v2", "v3"):
        _store(port, name, name.encode())
    for name in ("v1", "v3", "v3", "v2"):
        activated = port.activate_artifact(KIND, name)
        active = [artifact for artifact in port.list_artifacts(KIND) if artifact.is_active]
        assert [activated] == active
        assert (name, True) == (activated.name, activated.is_active)


def test_the_active_one_cannot_be_deleted(port: CatalogPort) -> None:
    for name in ("v1", "v2"):
        _store(port, name, LARGE)
    port.activate_artifact(KIND, "v1")
    with pytest.raises(ArtifactInUseError, match="latency_models/v1 is active"):
        port.delete_artifact(KIND, "v1")
    port.activate_artifact(KIND, "v2")
    port.delete_artifact(KIND, "v1")
    assert ["v2"] == [artifact.name for artifact in port.list_artifacts(KIND)]
    with pytest.raises(UnknownArtifactError):
        _read(port, "v1")
    assert LARGE == _read(port, "v2")


@pytest.mark.parametrize("method", ["read_artifact", "activate_artifact", "delete_artifact"])
def test_what_is_not_kept_is_said_with_what_is(method: str, port: CatalogPort) -> None:
    _store(port, "v12", SMALL)
    near = re.escape("'latency_models/v13'; did you mean latency_models/v12?")
    with pytest.raises(UnknownArtifactError, match=near):
        list(getattr(port, method)(KIND, "v13"))


def test_a_list_wants_a_kind(port: CatalogPort) -> None:
    with pytest.raises(InvalidRequestError, match="kind: must not be empty"):
        port.list_artifacts("")
