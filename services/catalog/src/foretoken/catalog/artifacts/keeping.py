"""The catalog's half that keeps files for other services."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from foretoken.catalog.artifacts import table
from foretoken.catalog.artifacts.spool import collect, open_spool
from foretoken.catalog.artifacts.table import check_artifact
from foretoken.catalog.storage.store import Store
from foretoken.domain.errors import (
    ArtifactInUseError,
    CorruptCatalogError,
    InvalidRequestError,
)
from foretoken.domain.measurements.measurement import Artifact

# A message of a stream.
_PIECE_BYTES = 2 * 2**20


class KeepsArtifacts:
    """Implements the methods of `CatalogPort` about artifacts. Safe to use from several threads."""

    def __init__(self, store: Store, max_bytes: int) -> None:
        """Keep the store, and how large a file may be."""
        self._store = store
        self._max_bytes = max_bytes

    def store_artifact(self, artifact: Artifact, content: Iterable[bytes]) -> Artifact:
        """Keep a file, all of it or, whatever happens, nothing; return what is known of it.

        The same kind, name and hash again changes nothing, and the content is not asked for.
        Another hash replaces what was. Whether it is active is `activate_artifact`'s to say: what
        replaces the active one is active, all else is not.

        Raises:
            InvalidRequestError: the content is not what the artifact says, or is too large.
            StorageFullError: the disk is full.

        """
        check_artifact(artifact, self._max_bytes)
        with self._store.cursor() as cursor:
            stored = table.find_same(cursor, artifact)
        if stored is not None:
            return stored
        with open_spool(self._store.scratch_folder) as spool:
            collect(spool, content, artifact.num_bytes, artifact.content_hash)
            with self._store.transaction() as cursor:
                if table.find_same(cursor, artifact) is None:  # nobody else was faster
                    table.write_artifact(cursor, artifact)
                    table.write_content(cursor, artifact, spool)
                return table.find_artifact(cursor, artifact.kind, artifact.name)

    def read_artifact(self, kind: str, name: str) -> Iterator[bytes]:
        """Yield a file's content in pieces of 2 MiB, checked before the first is there.

        Raises:
            UnknownArtifactError: it is not kept.
            CorruptCatalogError: the content has changed since it was stored.
            StorageFullError: there is no room next to the catalog for the file once more.

        """
        with open_spool(self._store.scratch_folder) as spool:
            with self._store.cursor() as cursor:
                cursor.begin()
                artifact = table.find_artifact(cursor, kind, name)
                table.read_content(cursor, kind, name, spool)
            if spool.content_hash() != artifact.content_hash:
                raise CorruptCatalogError(
                    f"the artifact {kind}/{name} is damaged: delete it and store it again, or "
                    "restore the catalog from a backup"
                )
            yield from spool.pieces(_PIECE_BYTES)

    def list_artifacts(self, kind: str) -> tuple[Artifact, ...]:
        """Return what is kept of a kind, newest first; nothing of one that nobody stored.

        Raises:
            InvalidRequestError: no kind is said.

        """
        if not kind:
            raise InvalidRequestError.of_field("kind", "must not be empty")
        with self._store.cursor() as cursor:
            return table.fetch_artifacts(cursor, kind)

    def activate_artifact(self, kind: str, name: str) -> Artifact:
        """Make this the active one of its kind, and the one that was no longer, in one step.

        Raises:
            UnknownArtifactError: it is not kept.

        """
        with self._store.transaction() as cursor:
            artifact = table.find_artifact(cursor, kind, name)
            table.activate(cursor, kind, name)
        return replace(artifact, is_active=True)

    def delete_artifact(self, kind: str, name: str) -> None:
        """Forget a file that is not active; its room is free after the next `compact`.

        Raises:
            UnknownArtifactError: it is not kept.
            ArtifactInUseError: it is active.

        """
        with self._store.transaction() as cursor:
            if table.find_artifact(cursor, kind, name).is_active:
                raise ArtifactInUseError(
                    f"the artifact {kind}/{name} is active; activate another first",
                    kind=kind,
                    name=name,
                )
            table.delete_row(cursor, kind, name)
            table.delete_content(cursor, kind, name)
