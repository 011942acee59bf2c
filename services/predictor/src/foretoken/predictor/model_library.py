"""All model versions: kept by the catalog, shared by every predictor, loaded as they are asked for.

The catalog's artifacts are the truth; the folder holds copies, so that a predictor starts without
its catalog too. The active version changes for all predictors within a refresh.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Self

from foretoken.domain import schema
from foretoken.domain.errors import (
    CorruptCatalogError,
    ForetokenError,
    InvalidRequestError,
    NotTrainedError,
    StorageFullError,
    UnknownModelVersionError,
)
from foretoken.domain.measurements.latency_models import ModelVersion
from foretoken.domain.measurements.measurement import Artifact
from foretoken.domain.name import check_name, path_inside
from foretoken.domain.text_file import Archive
from foretoken.predictor.learned_folder import LearnedFolder
from foretoken.predictor.model_set import ModelSet
from foretoken.predictor.model_store import read_models, write_models
from foretoken.predictor.packing import write_whole

if TYPE_CHECKING:
    from foretoken.domain.ports import CatalogPort


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionFacts:
    """The hash of the snapshot that was trained on, and how many rows of it were."""

    snapshot_hash: str
    num_rows: int

    @classmethod
    def of(cls, artifact: Artifact) -> Self:
        """Return what an artifact says; what another release has besides is left out.

        Raises:
            CorruptCatalogError: it does not say this, so no predictor stored it.

        """
        try:
            said = json.loads(artifact.metadata_json)
            known = {field.name: said[field.name] for field in fields(cls)}
            return schema.decode(cls, known, "metadata_json")
        except (ValueError, TypeError, KeyError, RecursionError, InvalidRequestError) as err:
            raise CorruptCatalogError(
                f"the artifact {artifact.kind}/{artifact.name} is no model version: its metadata"
                f" lacks what one says ({err!r}); delete it"
            ) from err

    def to_json(self) -> str:
        """Return them as an artifact's metadata."""
        return json.dumps(asdict(self))


_log = logging.getLogger(__name__)

_KIND = "latency_models"
# The file next to the copies that says which of them is active.
_POINTER = "active"
# What the names of copies end in.
_SUFFIX = ".models"
_VERSION_LENGTH = 16
# A copy half written for so long will not be finished.
_LEFTOVER_S = 3_600.0


class ModelLibrary:
    """The versions, of which one is active and a few are loaded."""

    def __init__(
        self, catalog: "CatalogPort", folder: Path, learned: LearnedFolder, *, max_loaded: int
    ) -> None:
        """Keep copies under `folder`; the active version and `max_loaded` pinned ones in memory.

        Models that versions have only the points of are kept in `learned`.
        """
        self._catalog = catalog
        self._learned = learned
        self._folder = folder
        self._max_loaded = max_loaded
        self._active = ModelSet()
        self._pinned: OrderedDict[str, ModelSet] = OrderedDict()
        self._warned: set[tuple[str, str]] = set()
        self._pinning, self._switching = threading.Lock(), threading.Lock()

    @property
    def active(self) -> ModelSet:
        """The models that answer; the empty set where nothing was trained yet."""
        return self._active

    def open(self) -> None:
        """Make the folder, and load the active version, from the copies if the catalog is away.

        Without either it answers as if nothing was trained, until `refresh` finds what it can load.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(f".*{_SUFFIX}.*"):
            # Another process of this home may be writing one now, or be done with it.
            with contextlib.suppress(FileNotFoundError):
                if time.time() - leftover.stat().st_mtime > _LEFTOVER_S:
                    leftover.unlink()
        try:
            self.refresh()
        except ForetokenError as err:
            version = self._read_pointer()
            _log.warning("on with the copy: version=%s: %s", version or "none", err.message)
            self._open_copy(version)

    def refresh(self) -> bool:
        """Take up the version that is active in the catalog; tell whether it is another one.

        Raises:
            ForetokenError: the catalog's; what answers stays as it is.

        """
        # Nothing else may become active between the look and what follows from it.
        with self._switching:
            kept = self._catalog.list_artifacts(_KIND)
            active = next((artifact for artifact in kept if artifact.is_active), None)
            present = (self._active.version, self._active.created_at)
            if active is None or (active.name, active.created_at) == present:
                return False
            self._activate(self._fetch(active))
        _log.info("model version taken up: version=%s", active.name)
        return True

    def find(self, version: str) -> ModelSet:
        """Return the models of a version, or of the one that begins like this; empty: the active.

        Raises:
            UnknownModelVersionError: no such version is kept, or several begin like this.
            ForetokenError: the catalog's, for a version that is not in memory.

        """
        active = self._active
        if version in ("", active.version):
            return active
        with self._pinning:
            models = self._pinned.get(version)
            if models is None:
                artifact = self._resolve(version)
                if artifact.name == active.version:
                    return active
                models = self._pinned.get(artifact.name) or self._fetch(artifact)
                self._pinned[models.version] = models
            self._pinned.move_to_end(models.version)
            while len(self._pinned) > self._max_loaded:
                self._pinned.popitem(last=False)
        return models

    def keep(self, models: ModelSet) -> ModelSet:
        """Keep models as a new version, which does not answer yet, and return them as read back."""
        content = write_models(models)
        content_hash = hashlib.sha256(content).hexdigest()
        facts = VersionFacts(snapshot_hash=models.snapshot_hash, num_rows=models.num_rows)
        artifact = Artifact(
            kind=_KIND,
            name=content_hash[:_VERSION_LENGTH],
            content_hash=content_hash,
            num_bytes=len(content),
            created_at=models.created_at,
            metadata_json=facts.to_json(),
        )
        write_whole(self._copy_of(artifact.name), content)
        # The same models may have been kept before.
        return self._fetch(self._catalog.store_artifact(artifact, (content,)))

    def take_up(self, models: ModelSet) -> Artifact:
        """Make models that are kept the ones that answer, for every predictor of the catalog."""
        with self._switching:
            artifact = self._catalog.activate_artifact(_KIND, models.version)
            self._activate(models)
        return artifact

    def activate(self, version: str) -> ModelVersion:
        """Make a kept version, or the one that begins like this, the one that answers.

        Raises:
            UnknownModelVersionError: no such version is kept, or several begin like this.

        """
        return _describe(self.take_up(self._fetch(self._resolve(version))))

    def list(self) -> tuple[ModelVersion, ...]:
        """Return the versions, newest first; an artifact that is none is left out."""
        found = []
        for artifact in self._catalog.list_artifacts(_KIND):
            try:
                self._copy_of(artifact.name)
                found.append(_describe(artifact))
            except CorruptCatalogError as err:
                self._warn_once(artifact, err)
        return tuple(found)

    def _activate(self, models: ModelSet) -> None:
        # One assignment: a question under way is answered by the models it began with.
        self._active = models
        write_whole(self._folder / _POINTER, models.version.encode())

    def _warn_once(self, artifact: Artifact, err: CorruptCatalogError) -> None:
        """Say what is wrong with an artifact the first time that it is met."""
        key = (artifact.name, artifact.created_at)
        if key not in self._warned:
            self._warned.add(key)
            _log.warning("left out of the model versions: %s", err.message)

    def _open_copy(self, version: str) -> None:
        try:
            if not version or not self._copy_of(version).exists():
                return
            self._active = self._load(version)
        except ForetokenError as err:
            _log.warning("the copy is of no use either: %s", err.message)

    def _resolve(self, version: str) -> Artifact:
        kept = self._catalog.list_artifacts(_KIND)
        exact = [artifact for artifact in kept if artifact.name == version]
        begun = [artifact for artifact in kept if version and artifact.name.startswith(version)]
        found = exact or begun
        if len(found) != 1:
            raise UnknownModelVersionError.named(version, [artifact.name for artifact in kept])
        return found[0]

    def _fetch(self, artifact: Artifact) -> ModelSet:
        facts, path = VersionFacts.of(artifact), self._copy_of(artifact.name)
        # Series are read when they are asked for: damage would show much later.
        if not path.exists() or _hash_file(path) != artifact.content_hash:
            self._copy(artifact)
        try:
            models = self._load(artifact.name)
        except CorruptCatalogError as err:
            _log.warning("copied anew: version=%s: %s", artifact.name, err.message)
            self._copy(artifact)
            models = self._load(artifact.name)
        return dataclasses.replace(
            models, created_at=artifact.created_at, snapshot_hash=facts.snapshot_hash
        )

    def _copy(self, artifact: Artifact) -> None:
        content = b"".join(self._catalog.read_artifact(_KIND, artifact.name))
        if hashlib.sha256(content).hexdigest() != artifact.content_hash:
            raise CorruptCatalogError(f"the model version {artifact.name} arrived damaged; retry")
        try:
            # What strangers made must not unpack to more than it may.
            Archive.open(content)
            write_whole(self._copy_of(artifact.name), content)
        except InvalidRequestError as err:
            raise _unreadable(artifact.name, err) from err
        except OSError as err:
            raise StorageFullError(
                f"the model version {artifact.name} cannot be copied to {self._folder}:"
                f" {err.strerror}; make room"
            ) from err

    def _load(self, version: str) -> ModelSet:
        try:
            models = read_models(self._copy_of(version), self._learned)
        except NotTrainedError:
            raise
        except Exception as err:  # what is damaged can fail anywhere
            raise _unreadable(version, err) from err
        return dataclasses.replace(models, version=version)

    def _copy_of(self, version: str) -> Path:
        """Return where the copy of a version lies, or will.

        Raises:
            CorruptCatalogError: the version's name is none.

        """
        try:
            return path_inside(self._folder, f"{check_name(version, 'version')}{_SUFFIX}")
        except InvalidRequestError as err:
            raise CorruptCatalogError(
                f"an artifact is no model version: {err.message}; delete it"
            ) from err

    def _read_pointer(self) -> str:
        pointer = self._folder / _POINTER
        return pointer.read_text("utf-8") if pointer.exists() else ""


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unreadable(version: str, err: Exception) -> CorruptCatalogError:
    return CorruptCatalogError(
        f"the model version {version} cannot be read ({err!r}): activate another, or train"
    )


def _describe(artifact: Artifact) -> ModelVersion:
    facts = VersionFacts.of(artifact)
    return ModelVersion(
        version=artifact.name,
        created_at=artifact.created_at,
        snapshot_hash=facts.snapshot_hash,
        num_rows=facts.num_rows,
        is_active=artifact.is_active,
    )
