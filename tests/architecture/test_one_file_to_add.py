"""What ARCHITECTURE.md's table says is one file to add, is: each is added to a copy and used."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_ROOTS = ("clients/python/src", *(f"services/{name}/src" for name in ("app", "catalog")))
_ROOTS += tuple(f"services/{name}/src" for name in ("predictor", "profiler", "simulator"))
_EXAMPLES = Path(__file__).resolve().parents[2] / "docs/examples"
_STUBS = "clients/python/gen"
_CLIENT = ("domain", "wire", "client", "jobs", "page")


@dataclass(frozen=True, kw_only=True)
class Addition:
    """A file, and the program that prints its name where the product has it.

    Each of `files` is its content, or the stem of a file of the same folder that it copies, and the
    words that end in its name there. Each of `lines` are a file, a text, and what it goes before.
    """

    files: Mapping[str, tuple[str, str] | str] = field(default_factory=dict)
    lines: Sequence[tuple[str, str, str]] = ()
    program: str


def _list(names: str) -> str:
    return f"print(foretoken('list', '{names}'))\n"


def _serve(*changes: str) -> str:
    return f"print(foretoken('--output', 'json', 'simulate', 'serving', serving, {_sets(changes)}))"


def _train(*changes: str) -> str:
    scenario = "'docs/examples/training.yaml'"
    command = f"'--output', 'json', 'simulate', 'training', {scenario}"
    return f"print(foretoken({command}, {_sets(changes)}))"


def _sets(changes: tuple[str, ...]) -> str:
    return ", ".join(f"'--set', {change!r}" for change in changes)


_POLICY = "{policy: newcomer, max_replicas: 3, interval_s: 1}"
_AXIS = """
import os

from foretoken.domain.lowering.options import ParallelPass


def rewrite(nodes, lowering):
    os.environ["REWRITTEN_BY"] = "newcomer"
    return nodes


PASS = ParallelPass(axis="newcomer", limits=lambda cases: (), rewrite=rewrite)
"""

_OPTION = """
    newcomer: int = option(3, "How many newcomers.")
"""
_OPTION_PROTO = """
  // Newcomers. Not set: 3.
  optional int64 newcomer = 99;
"""
_EXECUTOR = """
    if ray_address == "newcomer":
        from foretoken.jobs.executors.newcomer import InlineExecutor

        return InlineExecutor()
"""
_RPC = """
  // Count the newcomers of a kind.
  rpc CountNewcomers(CountNewcomersRequest) returns (CountNewcomersResponse);
"""
_MESSAGES = """
// Request of CountNewcomers.
message CountNewcomersRequest {
  // Their kind. Empty: an error.
  string kind = 1;
  // Count from here. 0: from nothing.
  int64 first = 2;
}

// How many there are.
message CountNewcomersResponse {
  // One number for each. Empty: none.
  repeated int64 numbers = 1;
}
"""
_PORT_METHOD = '''
    def count_newcomers(self, kind: str, first: int = 0) -> tuple[int, ...]:
        """Return the numbers of the newcomers of a kind."""

'''
_RPC_LINE = """
    count_newcomers = Unary(ProfilerPort.count_newcomers, Right.READ, is_idempotent=True)
"""
_RPC_PROGRAM = """
import asyncio, inspect, json
from concurrent.futures import ThreadPoolExecutor

import grpc

from foretoken.client.services import AsyncProfilerClient
from foretoken.client.channel import channel_arguments
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import ProfilerClient
from foretoken.profiler.servicer import register


class Profiler:
    def count_newcomers(self, kind, first=0):
        return tuple(range(first, first + len(kind)))


server = grpc.server(ThreadPoolExecutor(2))
register(server, Profiler())
options = ChannelOptions(address=f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
server.start()


async def count():
    async with AsyncProfilerClient.connect(options) as client:
        return await client.count_newcomers("gpu", 2)


with ProfilerClient.connect(options) as client:
    blocking = client.count_newcomers(kind="gpu")
config = json.loads(dict(channel_arguments(options))["grpc.service_config"])
retried = [name["method"] for name in config["methodConfig"][0]["name"]]
assert "CountNewcomers" in retried
assert ((0, 1, 2), (2, 3, 4)) == (blocking, asyncio.run(count()))
print(ProfilerClient.count_newcomers.__doc__)
print(inspect.signature(ProfilerClient.count_newcomers))
server.stop(grace=None).wait()
"""


_PROTOS = "proto/foretoken/api"
# Names the scheduler that is added.
_ENGINE = "domain/frameworks/engines/newcomers.yaml"
_SERVICE = f"{_PROTOS}/profiler/v1/profiler_service.proto"

_ADDITIONS = {
    "operator": Addition(
        files={
            "domain/operators/newcomer.py": ("copy", '"copy"'),
            "profiler/kernels/newcomer.py": ("copy", '"copy"'),
        },
        program=_list("operators")
        + "assert 'newcomer' in resolve('profiler.kernel:all_kernels')()",
    ),
    "device": Addition(
        files={"domain/hardware/devices/newcomer.yaml": ("a30", "")}, program=_list("devices")
    ),
    "topology": Addition(
        files={"domain/hardware/topologies/newcomer.yaml": ("a30_single_gpu", "")},
        program=_list("topologies"),
    ),
    "model": Addition(
        files={"domain/models/presets/newcomer.yaml": ("qwen2-7b", "")}, program=_list("models")
    ),
    "kind of layer": Addition(
        files={"domain/models/kinds/newcomer.py": ("mlp", 'name="mlp"')},
        program="print(resolve('domain.models.kinds.spec.kind:find_kind')('newcomer').name)",
    ),
    "parallelism axis": Addition(files={"domain/parallelism/newcomer.py": _AXIS}, program=_serve()),
    "serving engine at a version": Addition(
        files={"domain/frameworks/engines/newcomer.yaml": ("sarathi", "")},
        program=_serve("engine.profile=newcomer"),
    ),
    "scheduler": Addition(
        files={
            "simulator/engine/schedulers/newcomer.py": ("sarathi", ""),
            _ENGINE: ("sarathi", "scheduler: sarathi"),
        },
        program=_serve("engine.profile=newcomers"),
    ),
    "router": Addition(
        files={"simulator/cluster/routers/newcomer.py": ("round_robin", "")},
        program=_serve(
            "cluster.pools=[{name: all, num_replicas: 2}]", "cluster.routing.router=newcomer"
        ),
    ),
    "autoscaler": Addition(
        files={"simulator/cluster/autoscalers/newcomer.py": ("queue_length", "")},
        program=_serve(f"cluster.pools=[{{name: all, num_replicas: 2, autoscaling: {_POLICY}}}]"),
    ),
    "arrival process": Addition(
        files={"simulator/workload/arrivals/newcomer.py": ("poisson", "")},
        program=_serve("workload.arrival=newcomer"),
    ),
    "lengths": Addition(
        files={"simulator/workload/lengths/newcomer.py": ("fixed", "")},
        program=_serve("workload.prefill={kind: newcomer, mean: 30}"),
    ),
    "server to start": Addition(
        files={"simulator/launch/engines/newcomer.py": ("vllm", 'name = "vllm"')},
        program="print(resolve('simulator.launch.server:all_servers')())",
    ),
    "framework to launch": Addition(
        files={"simulator/launch/trainers/newcomer.py": ("torchtitan", '_NAME = "torchtitan"')},
        program="print(foretoken('generate', 'training', '--help'))",
    ),
    "method to cut layers to stages": Addition(
        files={"simulator/search/placement/partition/newcomer.py": ("even", '"even"')},
        program="print(resolve('simulator.search.placement.chain:find_method')('newcomer'))",
    ),
    "price list": Addition(
        files={"domain/hardware/prices/newcomer.yaml": ("lambda", "provider: Lambda")},
        program=_list("prices"),
    ),
    "dataset": Addition(
        files={"domain/requests/datasets/newcomer.yaml": ("c4", "")}, program=_list("datasets")
    ),
    "format of traces": Addition(
        files={"simulator/workload/traces/newcomer.py": ("burstgpt", "")},
        program=_serve(
            "workload.arrival=trace",
            f"workload.trace_path={_EXAMPLES}/burstgpt-trace.csv",
            "workload.trace_format=newcomer",
        ),
    ),
    "format of measured runs": Addition(
        files={"simulator/serving/measured_runs/newcomer.py": ("table", "")},
        program="print(resolve('simulator.validation.measured_run:all_formats')())",
    ),
    "format of step records": Addition(
        files={"simulator/serving/measured_steps/newcomer.py": ("sglang_log", "")},
        program="print(resolve('simulator.validation.measured_steps:all_step_formats')())",
    ),
    "training framework": Addition(
        files={"domain/frameworks/trainers/newcomer.yaml": ("megatron-core", "")},
        program=_train("trainer.profile=newcomer"),
    ),
    "pipeline schedule": Addition(
        files={"simulator/training/pipeline_schedules/newcomer.py": ("gpipe", '"gpipe"')},
        program=_train("pipeline_schedule=newcomer"),
    ),
    "importer": Addition(
        files={"catalog/importers/newcomer.py": ("nccl_tests/__init__", '"nccl_tests"')},
        program="print(foretoken('catalog', 'formats'))",
    ),
    "exporter": Addition(
        files={"catalog/exporters/newcomer.py": ("parquet", '"parquet"')},
        program="print(foretoken('catalog', 'formats'))",
    ),
    "option of a request": Addition(
        lines=(
            ("domain/measurements/profiling.py", _OPTION, "    skip_covered: bool = flag("),
            ("domain/requests/scenario.py", _OPTION, "    sequence_length: int = option("),
            (
                f"{_PROTOS}/types/v1/profiling.proto",
                _OPTION_PROTO,
                "  // A sweep of about a minute.",
            ),
            (f"{_PROTOS}/types/v1/scenario.proto", _OPTION_PROTO, "  // Tokens of one sample."),
        ),
        program=f"print(foretoken('profile', '--help'))\n{_train('newcomer=5')}",
    ),
    "place to run searches": Addition(
        files={"jobs/executors/newcomer.py": ("inline", "")},
        lines=(("jobs/executors/choice.py", _EXECUTOR, "    if not ray_address:"),),
        program="print(resolve('jobs.executors.choice:open_executor')('newcomer'))",
    ),
    "rpc": Addition(
        lines=(
            (_SERVICE, _RPC, "  // Return the devices of this machine."),
            (_SERVICE, _MESSAGES, "// Ask for the devices of this machine."),
            ("domain/ports.py", _PORT_METHOD, "    def list_local_devices(self)"),
            ("wire/rpcs.py", _RPC_LINE, "    list_local_devices = Unary("),
        ),
        program=_RPC_PROGRAM,
    ),
    "test of data quality": Addition(
        files={"catalog/quality/tests/newcomer.py": ("erratic", '"erratic"')},
        program="print(resolve('catalog.quality.test_definition:all_tests')())",
    ),
}

_DRIVER = """
import contextlib, io, json, pkgutil, sys, traceback

from typer.testing import CliRunner

from foretoken.app.cli.main import app


def resolve(name):
    return pkgutil.resolve_name(f"foretoken.{name}")


def foretoken(*arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


printed = {}
for name, program in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(program, {"foretoken": foretoken, "resolve": resolve, "serving": sys.argv[1]})
        except BaseException:
            traceback.print_exc(file=out)
            out.write("FAILED")
    printed[name] = out.getvalue()
print(json.dumps(printed))
"""
_SERVING = """
model: qwen2-7b
device: a30
dtype: fp16
engine: {profile: sarathi, max_num_seqs: 4, num_kv_blocks: 100}
workload:
  arrival: poisson
  rate_rps: 2.0
  num_requests: 3
  prefill: {kind: fixed, mean: 20}
  decode: {kind: fixed, mean: 3}
"""


def _package_path(copy: Path, name: str) -> Path:
    package = name.partition("/")[0]
    root = "clients/python" if package in _CLIENT else f"services/{package}"
    return copy / root / "src/foretoken" / name


def _add(copy: Path, addition: Addition) -> None:
    for name, origin in addition.files.items():
        path = _package_path(copy, name)
        assert not path.exists()
        if isinstance(origin, str):
            path.write_text(origin, "utf-8")
            continue
        stem, words = origin
        text = (path.parent / f"{stem}{path.suffix}").read_text("utf-8")
        assert words in text
        text = text.replace(words, re.sub(r"\w+(\W*)$", r"newcomer\1", words))
        path.write_text(text, "utf-8")
    for name, lines, before in addition.lines:
        path = copy / name if name.startswith("proto") else _package_path(copy, name)
        text = path.read_text("utf-8")
        assert text.count(before) == 1
        path.write_text(text.replace(before, f"{lines.lstrip(chr(10))}{before}"), "utf-8")


def _print_all(repository: Path, copy: Path) -> Mapping[str, str]:
    for root in _ROOTS:
        shutil.copytree(repository / root, copy / root)
    ignored = shutil.ignore_patterns("node_modules")
    shutil.copytree(repository / "proto", copy / "proto", ignore=ignored)
    for addition in _ADDITIONS.values():
        _add(copy, addition)
    subprocess.run([sys.executable, str(copy / "proto/generate.py")], check=True)
    (copy / "serving.yaml").write_text(_SERVING, "utf-8")
    ended = subprocess.run(
        [sys.executable, "-c", _DRIVER, str(copy / "serving.yaml")],
        input=json.dumps({name: addition.program for name, addition in _ADDITIONS.items()}),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(copy / root) for root in (*_ROOTS, _STUBS)),
            "FORETOKEN_HOME": str(copy / "home"),
            "FORETOKEN_JIT": "0",
            "COLUMNS": "200",
        },
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    answers: Mapping[str, str] = json.loads(ended.stdout)
    return answers


@pytest.mark.slow
def test_an_added_file_is_used(repository: Path, tmp_path: Path) -> None:
    """In one copy and process for all: together they take as long as any of them."""
    failed = {
        name: text
        for name, text in _print_all(repository, tmp_path).items()
        if "newcomer" not in text or text.endswith("FAILED")
    }
    assert not failed, "\n".join(f"{name}: {text}" for name, text in failed.items())


def test_the_table_has_what_is_added_and_nothing_else(repository: Path) -> None:
    text = (
        (repository / "ARCHITECTURE.md").read_text("utf-8").partition("## Where to add things")[2]
    )
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    things = {thing for cell, _ in rows if cell != "to add" for thing in cell.split(", ")}
    assert set(_ADDITIONS) | {"key of a scenario"} == things
    said = {re.sub("<.*>", "newcomer", path) for path in re.findall(r"`([^`]*<[^`]*)`", text)}
    assert {path for addition in _ADDITIONS.values() for path in addition.files} - {_ENGINE} == said
