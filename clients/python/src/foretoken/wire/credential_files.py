"""Certificates, keys and tokens in files, which are replaced while a process uses them."""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from foretoken.domain.errors import InvalidRequestError

# How old what is known of the files may be: a look costs some microseconds, a call not many more.
_LOOK_EVERY_S = 1.0
_MAX_LOOKS = 10

Signature = tuple[tuple[int, int, int], ...]


class CredentialFiles:
    """The contents of some files by the settings that name them, read again when they change."""

    def __init__(
        self, paths: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep the paths by setting; an empty one is a setting that is not made."""
        self._paths = {setting: Path(path) for setting, path in paths.items() if path}
        self._clock = clock
        self._known: Signature = ()
        self._looked_s = 0.0

    def read(self) -> Mapping[str, bytes]:
        """Return the contents by setting.

        What replaces several files in one step, as Kubernetes does with those of a Secret, does it
        before, after or between two of the readings: they are repeated until nothing changed
        meanwhile.

        Raises:
            InvalidRequestError: a file cannot be read, or they never stay the same.

        """
        for _ in range(_MAX_LOOKS):
            before = self._sign()
            contents = {setting: self._read(setting) for setting in self._paths}
            if before == self._sign():
                self._known, self._looked_s = before, self._clock()
                return contents
        names = ", ".join(map(str, self._paths.values()))
        raise InvalidRequestError.of_field(next(iter(self._paths)), f"{names} change all the time")

    def has_changed(self) -> bool:
        """Return whether a file is another than when they were read, as of up to a second ago."""
        if not self._paths:
            return False
        now_s = self._clock()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return False
        self._looked_s = now_s
        try:
            return self._sign() != self._known
        except InvalidRequestError:
            # Being replaced: what is known holds until there is something else.
            return False

    def _sign(self) -> Signature:
        found = [self._stat(setting) for setting in self._paths]
        return tuple((s.st_ino, s.st_size, s.st_mtime_ns) for s in found)

    def _stat(self, setting: str) -> os.stat_result:
        try:
            return self._paths[setting].stat()
        except OSError as err:
            raise self._unreadable(setting, err) from err

    def _read(self, setting: str) -> bytes:
        try:
            return self._paths[setting].read_bytes()
        except OSError as err:
            raise self._unreadable(setting, err) from err

    def _unreadable(self, setting: str, err: OSError) -> InvalidRequestError:
        return InvalidRequestError.of_field(
            setting, f"cannot read {self._paths[setting]}: {err.strerror}"
        )
