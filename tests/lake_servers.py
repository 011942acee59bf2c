"""What a lake needs besides the program: PostgreSQL and an object store, started for tests."""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import duckdb

from foretoken.catalog.config import LakeConfig
from foretoken.catalog.storage.lake import load_extension
from foretoken.domain.errors import InvalidRequestError

_DEBIAN_FOLDERS = "/usr/lib/postgresql"
_BUCKET = "measurements"


def find_missing() -> str:
    """Return what this machine lacks for a lake, or nothing."""
    if not _find_binary("initdb"):
        return "PostgreSQL is not on this machine"
    if not find_spec("moto"):
        return "moto, which stands in for S3, is not installed"
    # Last: that DuckDB has no such extension takes it seconds to find.
    try:
        with duckdb.connect() as connection:
            for name in ("postgres_scanner", "ducklake", "httpfs", "aws"):
                load_extension(connection, name)
    except InvalidRequestError as err:
        return err.message
    return ""


@dataclass(frozen=True, slots=True)
class Postgres:
    """A running server: how to reach it, and where it lies."""

    connection_string: str
    folder: Path

    def lake(self, data_path: str, schema_name: str, s3_endpoint: str = "") -> LakeConfig:
        """Return the configuration of a lake with its metadata here."""
        return LakeConfig(
            data_path=data_path,
            postgres=self.connection_string,
            schema_name=schema_name,
            s3_endpoint=s3_endpoint,
            s3_region="us-east-1" if s3_endpoint else "",
        )

    def execute(self, statement: str) -> None:
        """Run a statement as the superuser."""
        _run_unprivileged("psql", "--quiet", f"--command={statement}", self.connection_string)

    def back_up(self, folder: Path) -> None:
        """Take a base backup of it into a new folder."""
        place = ("--pgdata", str(folder), "--dbname", self.connection_string)
        _run_unprivileged("pg_basebackup", "--checkpoint=fast", "--no-sync", *place)

    def run(self, program: str, *arguments: str) -> None:
        """Run a program of the system as the user whose folder it is."""
        _run_unprivileged(program, *arguments)

    def configure(self, *lines: str) -> None:
        """Add lines to its configuration, for its next start."""
        with (self.folder / "data" / "postgresql.conf").open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)

    def start(self) -> None:
        """Start it, or start it again."""
        self._control("--wait", "--log", str(self.folder / "log"), "start")

    def stop(self) -> None:
        """Stop it without waiting for its clients, as a crash of its machine would."""
        self._control("--mode=immediate", "stop")

    @contextlib.contextmanager
    def running(self) -> Iterator["Postgres"]:
        """Run it until the end."""
        self.start()
        try:
            yield self
        finally:
            self.stop()

    def _control(self, *arguments: str) -> None:
        _run_unprivileged("pg_ctl", "--pgdata", str(self.folder / "data"), *arguments)


@contextlib.contextmanager
def serve_postgres(*, is_durable: bool = False) -> Iterator[Postgres]:
    """Run a new server on a socket in a folder of its own, as a user that is not root."""
    with tempfile.TemporaryDirectory(prefix="foretoken-postgres-") as name:
        folder = Path(name)
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        data = str(folder / "data")
        _run_unprivileged("initdb", "--no-sync", "--username=foretoken", "--pgdata", data)
        postgres = Postgres(f"host={folder} user=foretoken dbname=postgres", folder)
        postgres.configure("listen_addresses = ''", f"unix_socket_directories = '{folder}'")
        if not is_durable:
            postgres.configure("fsync = off")
        with postgres.running():
            yield postgres


@contextlib.contextmanager
def serve_s3() -> Iterator[tuple[str, str]]:
    """Run an object store in memory; yield its address and a bucket in it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{port}"
            _make_bucket(f"{address}/{_BUCKET}", deadline_s=time.monotonic() + 60)
            yield address, f"s3://{_BUCKET}"
        finally:
            server.kill()
            server.wait()


def _make_bucket(url: str, deadline_s: float) -> None:
    while True:
        request = urllib.request.Request(url, method="PUT")  # noqa: S310 - loopback
        try:
            urllib.request.urlopen(request, timeout=10).close()  # noqa: S310
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
        else:
            return


def _run_unprivileged(program: str, *arguments: str) -> None:
    user = "nobody" if os.geteuid() == 0 else None
    command = [_find_binary(program), *arguments]
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    subprocess.run(
        command,
        check=True,
        cwd="/",
        env=environment,
        user=user,
        group="nogroup" if user else None,
        extra_groups=[] if user else None,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _find_binary(name: str) -> str:
    """Return the path of a program of PostgreSQL, or nothing."""
    versions = sorted(Path(_DEBIAN_FOLDERS).glob(f"*/bin/{name}"))
    return str(versions[-1]) if versions else shutil.which(name) or ""
