"""`foretoken profile --on kubernetes`: shards as real processes, a catalog behind TLS and a token.

Whatever is killed in the middle, the shards together measure the plan: all of it, nothing twice.
"""

import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from certificates import sign_itself
from kubernetes_jobs import JobController
from kubernetes_server import KubernetesServer

from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import CatalogClient
from foretoken.domain.measurements.measurement import MeasurementFilter
from foretoken.profiler.planning.coverage import SHARD_KEY
from foretoken.wire.arrow import read_table

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_PROGRAM = (sys.executable, "-m", "foretoken.app")
_OPERATORS = ("--operator", "residual_add", "--operator", "softmax")
_PROFILE = ("profile", "--device", "cpu", "--quick")
# Eight samples of a call, on any machine: none is through before it can be killed.
_TIMING = {
    "batch_rows": 3,
    "drift_check_s": 0.5,
    "quick_timer": {
        "min_samples": 8,
        "max_samples": 8,
        "sample_us_min": 20_000.0,
        "warm_up_s_min": 0.0,
        "warm_up_s_max": 0.005,
        "case_s_max": 0.2,
        "max_input_sets": 2,
    },
}
_REPOSITORY = Path(__file__).parents[2]
_ROLE = _REPOSITORY / "deploy/k8s/components/profiler-controller/role.yaml"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Catalog:
    """A catalog that can be killed and started again where it was."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.port = _free_port()
        sign_itself(home)
        (home / "token").write_text("open-sesame")
        self.start()

    @property
    def client(self) -> Mapping[str, object]:
        """The section `client` of those who call it."""
        return {"ca_file": f"{self._home}/cert.pem", "token_file": f"{self._home}/token"}

    def start(self) -> None:
        server = {
            "port": self.port,
            "metrics_port": -1,
            "tls_certificate_file": f"{self._home}/cert.pem",
            "tls_key_file": f"{self._home}/key.pem",
            "token_file": f"{self._home}/token",
        }
        config = self._home / "catalog.yaml"
        config.write_text(yaml.safe_dump({"home": f"{self._home}/catalog", "server": server}))
        command = [*_PROGRAM, "--config", str(config), "serve", "catalog"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith("serving ")

    def end(self, by: signal.Signals) -> None:
        with self._process as process:
            process.send_signal(by)

    def read_rows(self) -> list[tuple[str, str, tuple[object, ...]]]:
        """Return the run, the shard and the point of every row."""
        options = ChannelOptions(address=f"127.0.0.1:{self.port}", **self.client)  # type: ignore[arg-type]
        with CatalogClient.connect(options) as client:
            selection = MeasurementFilter(include_failed=True, include_flagged=True)
            table = read_table(client.read_measurements(selection))
            shards = {s.run.run_id: s.run.environment[SHARD_KEY] for s in client.list_runs()}
        names = ("run_id", "operator", "phase", "dtype", "variant", "dims")
        columns = zip(*(table.column(name).to_pylist() for name in names), strict=True)
        return [
            (run_id, shards[run_id], (*point, tuple(sorted(dict(dims).items()))))
            for run_id, *point, dims in columns
        ]

    def count_rows(self) -> int:
        return len(self.read_rows())


class _Cluster:
    """An API server that grants what our Role grants, its controller, and a catalog."""

    def __init__(self, folder: Path, rules: list[Mapping[str, Any]]) -> None:
        self.folder = folder
        self.server = KubernetesServer(rules)
        self.server.add_node("worker")
        self.controller = JobController(self.server, folder / "pods")
        self.catalog = _Catalog(folder)
        cluster = {
            "kubeconfig": str(self.server.write_kubeconfig(folder)),
            "follow_s": 1,
            "collectives": {"port": _free_port()},
        }
        content = {
            "home": f"{folder}/client",
            "endpoints": {"catalog": f"127.0.0.1:{self.catalog.port}"},
            "client": dict(self.catalog.client),
            "profiler": {
                "kubernetes": cluster,
                "batch_rows": 5,
                "num_threads": 1,
                # Each point once: disturbed cases are not timed again.
                "retime_ratio": 0.0,
            },
        }
        self.config = folder / "client.yaml"
        self.config.write_text(yaml.safe_dump(content))

    def profile(
        self, num_shards: int, operators: Sequence[str] = _OPERATORS
    ) -> "subprocess.Popen[str]":
        """Start the command, as a user would."""
        command = [*_PROGRAM, "--config", str(self.config), "--output", "json", *_PROFILE]
        return subprocess.Popen(
            [*command, *operators, "--on", "kubernetes", "--shards", str(num_shards)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="module")
def num_planned(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many calls the command would time where nothing is known yet."""
    home = str(tmp_path_factory.mktemp("planned"))
    command = [*_PROGRAM, "--home", home, "--output", "json", *_PROFILE, *_OPERATORS, "--dry-run"]
    outline = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return int(outline["num_calls"])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[_Cluster]:
    documents = yaml.safe_load_all(_ROLE.read_text(encoding="utf-8"))
    rules = [rule for document in documents for rule in document.get("rules", ())]
    cluster = _Cluster(tmp_path, rules)
    with cluster.server, cluster.controller:
        yield cluster
    cluster.catalog.end(signal.SIGTERM)


def _report(process: "subprocess.Popen[str]") -> Mapping[str, Any]:
    output, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    report: Mapping[str, Any] = json.loads(output)
    return report


def _wait_until(is_so: Callable[[], bool], within_s: float = 300.0) -> None:
    end_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def _check_whole(
    cluster: _Cluster, report: Mapping[str, Any], num_planned: int, num_shards: int
) -> None:
    """Check that the shards measured the plan, each its part, and that the report says so."""
    rows = cluster.catalog.read_rows()
    assert [num_planned] * 3 == [
        len(rows),
        report["num_planned"],
        report["num_measured"] + report["num_failed"],
    ]
    assert {f"{index}/{num_shards}" for index in range(num_shards)} == {row[1] for row in rows}
    # Some are timed twice on purpose: the report says how many.
    times = Counter(point for _, _, point in rows)
    assert {1, 2} == set(times.values())
    assert report["num_repeats"] == num_planned - len(times)


def test_what_is_killed_in_the_middle_loses_and_repeats_nothing(
    cluster: _Cluster, num_planned: int
) -> None:
    """A shard by its own fault, one with its node, the client, and the catalog they all need."""
    first = cluster.profile(2)
    _wait_until(lambda: cluster.catalog.count_rows() >= 3)
    first.kill()
    first.communicate()
    pods = cluster.controller.running()
    assert len(pods) == 2
    cluster.controller.kill(pods[0])
    cluster.controller.kill(pods[1], is_disruption=True)
    cluster.catalog.end(signal.SIGKILL)
    second = cluster.profile(2)
    cluster.catalog.start()
    _check_whole(cluster, _report(second), num_planned, 2)
    assert cluster.server.requests.count(("create", "jobs")) == 1
    (job,) = cluster.server.store.list("jobs", lambda _: True)
    assert (2, 1) == (job["status"]["succeeded"], job["status"]["failed"])


def test_an_interrupted_command_deletes_its_job(cluster: _Cluster) -> None:
    cluster.controller.run_instead([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    process = cluster.profile(2)
    _wait_until(lambda: len(cluster.controller.running()) == 2)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=300)
    # For who is killed instead, and can delete nothing.
    assert "--namespace foretoken delete job foretoken-" in told
    assert process.returncode == 128 + signal.SIGINT
    _wait_until(lambda: not cluster.server.store.list("jobs", lambda _: True))
    assert {"nodes"} == {plural for plural, _ in cluster.server.store.objects}


def test_what_keeps_pods_away_is_reported_in_a_pipe_and_ends_the_command(cluster: _Cluster) -> None:
    """On a line of its own, however little there is to report otherwise."""
    cluster.controller.refuses_pods = "exceeded quota: gpus"
    content = yaml.safe_load(cluster.config.read_text())
    content["profiler"]["kubernetes"]["start_s_max"] = 2
    cluster.config.write_text(yaml.safe_dump(content))
    process = cluster.profile(2)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 1
    line = "the cluster refuses its pods (Error creating: pods is forbidden: exceeded quota: gpus)"
    assert line in told.splitlines()
    assert "profiler.kubernetes.start_s_max is how long to wait" in told
    _wait_until(lambda: not cluster.server.store.list("jobs", lambda _: True))


def test_collectives_of_two_nodes_meet_by_the_service_of_their_job(cluster: _Cluster) -> None:
    """Groups span both nodes; the first one records."""
    points = cluster.folder / "points.csv"
    points.write_text(
        "operator,dtype,message_bytes,devices_per_node,num_nodes\n"
        "all_reduce,fp32,65536,1,2\nall_gather,fp32,65536,2,2\n"
    )
    report = _report(cluster.profile(2, ("--points", str(points))))
    rows = cluster.catalog.read_rows()
    assert {"all_reduce", "all_gather"} == {point[0] for _, _, point in rows}
    assert report["num_measured"] == len(rows)
    assert 1 == len({run_id for run_id, _, _ in rows})
    (service,) = cluster.server.store.list("services", lambda _: True)
    assert service["spec"]["clusterIP"] == "None"
