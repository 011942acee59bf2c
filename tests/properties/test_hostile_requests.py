"""Whatever the strings of a request say, nothing outside the home appears, changes or vanishes."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hostile_walk import FieldPath, hostile_values, put, walk_fields
from sound_requests import PARTS, has_sound_request, rest_of_stream, sound_request

from foretoken.api.catalog.v1 import catalog_service_pb2
from foretoken.api.predictor.v1 import predictor_service_pb2
from foretoken.api.profiler.v1 import profiler_service_pb2
from foretoken.api.simulator.v1 import simulator_service_pb2
from foretoken.api.types.v1 import artifact_pb2, job_pb2

_SERVICES: tuple[ServiceDescriptor, ...] = tuple(
    service
    for module in (
        catalog_service_pb2,
        predictor_service_pb2,
        profiler_service_pb2,
        simulator_service_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)
# No answer to a request, however odd that is.
_DEFECTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
# Only for what hangs.
_DEADLINE_S = 120.0
# A stream that lasts until a job ends is left before.
_STREAM_DEADLINE_S = 5.0
_MESSAGES_READ = 3
# All values for all strings take minutes: longer than one test may.
_NUM_PARTS = 8
_CONFIG = """
predictor: {refresh_s: 0.1, drift_s: 3600}
simulator: {max_queued_jobs: 100000, compiles_at_start: false}
"""


class Target:
    """A server with all services, and what lies around its home."""

    def __init__(self, root: Path, channel: grpc.Channel) -> None:
        self.root = root
        self.victim = root / "outside" / "victim"
        self.defects: list[str] = []
        self.num_answered = 0
        self._channel = channel

    def call(self, method: MethodDescriptor, first: Message) -> Any:
        """Send a request, and return the last message of the answer; none where it is an error."""
        way = ["stream" if is_so else "unary" for is_so in _streams_of(method)]
        call = getattr(self._channel, "_".join(way))(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=type(first).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        request = iter([first, *rest_of_stream(method)]) if method.client_streaming else first
        is_stream = method.server_streaming
        try:
            answer = call(request, timeout=_STREAM_DEADLINE_S if is_stream else _DEADLINE_S)
            if is_stream:
                found = list(islice(answer, _MESSAGES_READ))
                answer.cancel()
                answer = found[-1] if found else None
        except grpc.RpcError as err:
            is_hung = err.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not is_stream
            if err.code() in _DEFECTS or is_hung:
                self.defects.append(f"{method.full_name}: {err.code().name} {err.details()!r:.200}")
            return None
        self.num_answered += 1
        return answer

    def attack(self, method: MethodDescriptor, at: FieldPath, value: str) -> None:
        """Send a request that is sound but for one string, and follow up what it begins."""
        request = sound_request(method)
        put(request, at, value, PARTS)
        num_defects = len(self.defects)
        answer = self.call(method, request)
        if len(self.defects) > num_defects:
            self.defects[-1] += f" for {'.'.join(at)}={value!r:.80}"
        if isinstance(answer, artifact_pb2.Artifact) and method.name == "StoreArtifact":
            key = {"kind": answer.kind, "name": answer.name}
            self.ask("CatalogService", "ActivateArtifact", key)
            self.ask("PredictorService", "ActivateModel", {"version": answer.name})
        self.end(method, answer)

    def end(self, method: MethodDescriptor, answer: Any) -> None:
        """Cancel the job that a request began; a profile is left to record what it times."""
        if isinstance(answer, job_pb2.Job) and method.name not in ("CreateProfile", "CancelJob"):
            self.ask(method.containing_service.name, "CancelJob", {"job_id": answer.job_id})

    def ask(self, service_name: str, rpc: str, content: Mapping[str, Any]) -> Any:
        """Call an rpc by its name."""
        (service,) = (one for one in _SERVICES if one.name == service_name)
        method = service.methods_by_name[rpc]
        return self.call(method, GetMessageClass(method.input_type)(**content))


def _streams_of(method: MethodDescriptor) -> tuple[bool, bool]:
    return method.client_streaming, method.server_streaming


@contextmanager
def _serve(root: Path) -> Iterator[Target]:
    """Serve everything on loopback from a folder among others that nobody must touch."""
    for name in ("outside/victim/nested", "work/victim", "user/victim", "tmp", "home-victim"):
        (root / name).mkdir(parents=True)
        (root / name / "precious.txt").write_text(name)
    for name in ("victim.partial", "victim.tmp", "victim.job.json", "victim.npz"):
        (root / "outside" / name).write_text(name)
    (root / "outside" / "link").symlink_to(root / "outside" / "victim")
    (root / "config.yaml").write_text(_CONFIG)
    command = [
        sys.executable, "-m", "foretoken.app", "--config", str(root / "config.yaml"),
        "--home", str(root / "home"), "serve", "--port", "0", "--metrics-port", "-1",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "HOME": str(root / "user"),
        "TMPDIR": str(root / "tmp"),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(root / "home" / "torch"),
    }
    log = (root / "home.log").open("w")
    with log, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=root / "work", env=environment
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving "), (root / "home.log").read_text()[-2000:]
            address = line.removeprefix("serving ").strip()
            with grpc.insecure_channel(address) as channel:
                yield Target(root, channel)
        finally:
            process.terminate()
            # A job under way may first have to compile; a hang is for the limit of the test.
            process.wait()


def _list(root: Path) -> dict[str, tuple[object, ...]]:
    """Return what lies outside the home: kind, time of change and content of each."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(root):
        if Path(folder) == root:
            folders.remove("home")
            files.remove("home.log")
        for name in (*folders, *files):
            path = Path(folder) / name
            about = path.lstat()
            is_file = path.is_file() and not path.is_symlink()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
            found[str(path.relative_to(root))] = (about.st_mode, about.st_mtime_ns, content)
    return found


def _wait_for_jobs(target: Target) -> None:
    """Wait until no job runs any more, so that none writes after the second look."""
    for service in _SERVICES:
        end_s = time.monotonic() + _DEADLINE_S
        while True:
            listed = target.ask(service.name, "ListJobs", {"page_size": 1000})
            if all(job.state > job_pb2.JOB_STATE_RUNNING for job in listed.jobs):
                break
            assert time.monotonic() < end_s, "a job does not end"
            time.sleep(0.2)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with _serve(tmp_path) as target:
        yield target


@pytest.mark.slow
def test_every_sound_request_is_answered(target: Target) -> None:
    """Where one is refused, the walk of its strings ends where it is looked at first."""
    refused = []
    for service in _SERVICES:
        for method in filter(has_sound_request, service.methods):
            num_answered = target.num_answered
            answer = target.call(method, sound_request(method))
            refused += [method.name] * (num_answered + 1 - target.num_answered)
            target.end(method, answer)
    _wait_for_jobs(target)
    assert [] == refused


@pytest.mark.slow
@pytest.mark.parametrize("part", range(_NUM_PARTS))
def test_no_string_of_a_request_leads_out_of_the_home(target: Target, part: int) -> None:
    """Nor does one make a service fail unexpectedly, or hide what others stored.

    Every string takes a part of the values.
    """
    values = hostile_values(target.victim)[part::_NUM_PARTS]
    store = _SERVICES[0].methods_by_name["StoreArtifact"]
    broken = sound_request(store)
    put(broken, ("artifact", "metadata_json"), "{}", PARTS)
    put(broken, ("artifact", "name"), "broken", PARTS)
    assert target.call(store, broken) is not None
    target.ask("CatalogService", "ActivateArtifact", {"kind": "latency_models", "name": "broken"})
    before = _list(target.root)
    for method in (method for service in _SERVICES for method in service.methods):
        for at in walk_fields(method.input_type):
            for value in values:
                target.attack(method, at, value)
    listed = target.ask("PredictorService", "ListModels", {})
    _wait_for_jobs(target)
    after = _list(target.root)
    changed = sorted(key for key in before | after if before.get(key) != after.get(key))
    assert ([], [], True) == (changed, target.defects, listed is not None)
