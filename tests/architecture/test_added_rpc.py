"""An rpc is added by its proto, a line of the table and a method of the port, and nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_PROTO = """
  // Count the devices of a kind.
  rpc CountDevices(CountDevicesRequest) returns (CountDevicesResponse);
"""
_MESSAGES = """
// Ask how many devices there are.
message CountDevicesRequest {
  // Their kind. Empty: an error.
  string kind = 1;
  // Count from here. 0: from nothing.
  int64 first = 2;
}

// How many there are.
message CountDevicesResponse {
  // One number for each. Empty: none.
  repeated int64 numbers = 1;
}
"""
_METHOD = '''
    def count_devices(self, kind: str, first: int = 0) -> tuple[int, ...]:
        """Return the numbers of the devices of a kind."""

'''
_LINE = """
    count_devices = Unary(ProfilerPort.count_devices, is_idempotent=True)
"""
_BEFORE_METHOD = "    def list_local_devices(self)"
_BEFORE_LINE = "    list_local_devices = Unary("
_BEFORE_PROTO = "  // Return the devices of this machine."

_PROGRAM = """
import asyncio, inspect, json
from concurrent.futures import ThreadPoolExecutor

import grpc

from foretoken.client.aio.profiler import AsyncProfilerClient
from foretoken.client.channel import channel_arguments
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.profiler import ProfilerClient
from foretoken.profiler.servicer import register


class Profiler:
    def count_devices(self, kind, first=0):
        return tuple(range(first, first + len(kind)))


server = grpc.server(ThreadPoolExecutor(2))
register(server, Profiler())
options = ChannelOptions(address=f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
server.start()


async def count():
    async with AsyncProfilerClient.connect(options) as client:
        return await client.count_devices("gpu", 2)


with ProfilerClient.connect(options) as client:
    blocking = client.count_devices(kind="gpu")
config = json.loads(dict(channel_arguments(options))["grpc.service_config"])
retried = [name["method"] for name in config["methodConfig"][0]["name"]]
print(blocking, asyncio.run(count()), "CountDevices" in retried)
print(inspect.signature(ProfilerClient.count_devices), ProfilerClient.count_devices.__doc__)
server.stop(grace=None).wait()
"""


def _insert(path: Path, text: str, before: str) -> None:
    content = path.read_text(encoding="utf-8")
    assert content.count(before) == 1
    path.write_text(content.replace(before, f"{text.lstrip(chr(10))}{before}"), encoding="utf-8")


@pytest.fixture
def copy(repository: Path, tmp_path: Path) -> Path:
    for folder in ("proto", "clients/python/src", "services/profiler/src"):
        shutil.copytree(
            repository / folder, tmp_path / folder, ignore=shutil.ignore_patterns("node_modules")
        )
    return tmp_path


def _run(copy: Path, *arguments: str) -> str:
    roots = ("clients/python/gen", "clients/python/src", "services/profiler/src")
    path = os.pathsep.join(str(copy / root) for root in roots)
    ended = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_three_places_make_an_rpc_of_both_clients_and_the_server(copy: Path) -> None:
    proto = copy / "proto/foretoken/api/profiler/v1/profiler_service.proto"
    _insert(proto, _PROTO, _BEFORE_PROTO)
    proto.write_text(proto.read_text(encoding="utf-8") + _MESSAGES, encoding="utf-8")
    source = copy / "clients/python/src/foretoken"
    _insert(source / "domain/ports.py", _METHOD, _BEFORE_METHOD)
    _insert(source / "wire/rpcs.py", _LINE, _BEFORE_LINE)
    _run(copy, str(copy / "proto/generate.py"))
    answers, signature = _run(copy, "-c", _PROGRAM).splitlines()
    assert "(0, 1, 2) (2, 3, 4) True" == answers
    assert (
        "(self, kind: str, first: int = 0) -> tuple[int, ...]"
        " Return the numbers of the devices of a kind." == signature
    )
