"""Services in processes of their own that cost little to start: forked from one that has imported.

Run as a program it reads a line of JSON for each process to start, the name of a service and its
configuration, and prints its id when it serves, 0 where it does not. It waits for those that ended,
so that none stays.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self


class Pods:
    """Starts services, each in a process of its own, and ends them."""

    def __init__(self) -> None:
        """Start the process that the others are forked from."""
        self._parent = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "OMP_NUM_THREADS": "1",
                "GRPC_ENABLE_FORK_SUPPORT": "0",
            },
        )
        self._running: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in tuple(self._running):
            self.end(pid, signal.SIGKILL)
        with self._parent as parent:
            parent.kill()

    def start(self, service: str, config: Mapping[str, Any]) -> int:
        """Start a service and return its process's id when it serves, or 0 where it does not."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps([service, config]) + "\n")
        self._parent.stdin.flush()
        pid = int(self._parent.stdout.readline())
        if pid:
            self._running.add(pid)
        return pid

    def end(self, pid: int, by: signal.Signals) -> None:
        """Send a signal to a process; a killed one is gone then."""
        self._running.discard(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, by)


def _serve(service: str, config: Mapping[str, Any], sink: int) -> None:
    from foretoken.app.config import AppConfig
    from foretoken.app.serve import serve_until_stopped
    from foretoken.domain import schema

    def announce(_port: int) -> None:
        os.write(sink, f"{os.getpid()}\n".encode())

    serve_until_stopped([service], schema.decode(AppConfig, config), announce)


def _import_all() -> None:
    import foretoken.app.compose
    import foretoken.app.serve
    import foretoken.catalog.servicer
    import foretoken.client.services
    import foretoken.predictor.service
    import foretoken.predictor.servicer
    import foretoken.profiler.cluster.service
    import foretoken.profiler.servicer
    import foretoken.simulator.search.serving.search
    import foretoken.simulator.search.training.search
    import foretoken.simulator.service
    import foretoken.simulator.servicer
    import foretoken.simulator.training.step  # noqa: F401


def main() -> None:
    """Fork a process for each line."""
    _import_all()
    sink = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        service, config = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.close(0)
            try:
                _serve(service, config, sink)
            except BaseException:  # noqa: BLE001
                # A copy of this process, which must not go on with its work.
                traceback.print_exc()
                os.write(sink, b"0\n")
            finally:
                os._exit(0)
        threading.Thread(target=os.waitpid, args=(pid, 0), daemon=True).start()


if __name__ == "__main__":
    main()
