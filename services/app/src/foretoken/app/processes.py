"""Start services as processes of their own on loopback, and stop them whatever happens."""

import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from foretoken.app.config import AppConfig, EndpointsConfig
from foretoken.domain.errors import ServiceUnavailableError

_log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 15.0

# Which services each one calls: it is started after them.
_NEEDS: Mapping[str, Sequence[str]] = {
    "catalog": (),
    "predictor": ("catalog",),
    "simulator": ("predictor", "catalog"),
    "profiler": ("catalog",),
}


class ServiceProcesses:
    """The four services, each a `foretoken serve` of its own, with files under `home`.

    A context manager: leaving it stops every process and waits for it.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._running = ExitStack()
        self._addresses: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Start the services in the order they need each other."""
        try:
            for name in _NEEDS:
                self._addresses[name] = self._start(name)
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop every process."""
        self._running.close()

    @property
    def client_config(self) -> AppConfig:
        """A configuration in which all four services are these processes."""
        return AppConfig(home=str(self._home), endpoints=EndpointsConfig(**self._addresses))

    def _start(self, name: str) -> str:
        command = [sys.executable, "-m", "foretoken.app", "--home", str(self._home)]
        for needed in _NEEDS[name]:
            command += ["--endpoint", f"{needed}={self._addresses[needed]}"]
        command += ["serve", name, "--port", "0", "--metrics-port", "-1"]
        log_path = self._home / f"{name}.log"
        log_file = self._running.enter_context(log_path.open("w", encoding="utf-8"))
        process = subprocess.Popen(  # noqa: S603 - our own program
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log_file, text=True
        )
        self._running.callback(_stop, process, name)
        # The service prints its address once it serves; an end of file means it died.
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith("serving "):
            tail = log_path.read_text(encoding="utf-8")[-2000:]
            raise ServiceUnavailableError(f"{name} did not start:\n{tail}", service=name)
        return line.removeprefix("serving ").strip()


def _stop(process: subprocess.Popen[str], name: str) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        _log.warning("killing service=%s: it did not stop in %.0f s", name, _STOP_TIMEOUT_S)
        process.kill()
        process.wait()
    if process.stdout:
        process.stdout.close()
