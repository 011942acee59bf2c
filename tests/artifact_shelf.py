"""Files of other services, kept in memory: that part of `CatalogPort`, for fakes of it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from foretoken.domain.errors import ArtifactInUseError, UnknownArtifactError
from foretoken.domain.measurements.measurement import Artifact


@dataclass
class ArtifactShelf:
    """Believes what is said of a content. `artifacts` has both, by kind and name."""

    artifacts: dict[tuple[str, str], tuple[Artifact, bytes]] = field(
        default_factory=dict, init=False
    )

    def store_artifact(self, artifact: Artifact, content: Iterable[bytes]) -> Artifact:
        """Keep a file; what replaces the active one is active."""
        key = (artifact.kind, artifact.name)
        is_active = False
        if key in self.artifacts:
            stored, _ = self.artifacts[key]
            if stored.content_hash == artifact.content_hash:
                return stored
            is_active = stored.is_active
        kept = replace(artifact, is_active=is_active)
        self.artifacts[key] = kept, b"".join(content)
        return kept

    def read_artifact(self, kind: str, name: str) -> Iterator[bytes]:
        """Yield a file in two pieces."""
        _, content = self._find(kind, name)
        middle = len(content) // 2
        yield content[:middle]
        yield content[middle:]

    def list_artifacts(self, kind: str) -> tuple[Artifact, ...]:
        """Return what is kept of a kind, newest first."""
        kept = [artifact for artifact, _ in self.artifacts.values() if artifact.kind == kind]
        return tuple(sorted(kept, key=lambda artifact: artifact.created_at, reverse=True))

    def activate_artifact(self, kind: str, name: str) -> Artifact:
        """Make this the active one of its kind."""
        self._find(kind, name)
        for key, (artifact, content) in self.artifacts.items():
            if artifact.kind == kind:
                is_active = artifact.name == name
                self.artifacts[key] = replace(artifact, is_active=is_active), content
        return self._find(kind, name)[0]

    def delete_artifact(self, kind: str, name: str) -> None:
        """Forget a file that is not active."""
        artifact, _ = self._find(kind, name)
        if artifact.is_active:
            raise ArtifactInUseError(f"the artifact {kind}/{name} is active")
        del self.artifacts[kind, name]

    def _find(self, kind: str, name: str) -> tuple[Artifact, bytes]:
        known = {f"{kind}/{name}": kept for (kind, name), kept in self.artifacts.items()}
        return UnknownArtifactError.look_up(f"{kind}/{name}", known)
