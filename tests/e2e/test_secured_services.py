"""The services with the certificates and the roles that the manifests give their pods."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from certificates import Authority, Identity

from foretoken.app.compose import Composition
from foretoken.app.config import AppConfig, EndpointsConfig
from foretoken.app.demo import _serving
from foretoken.client.channel_options import ChannelOptions
from foretoken.client.services import CatalogClient, PredictorClient
from foretoken.domain.errors import NotAllowedError, UnknownModelVersionError
from foretoken.domain.measurements.profiling import ProfileRequest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_PATCH = Path(__file__).parents[2] / "deploy/k8s/components/tls/serving-pod.yaml"
# Each with the endpoints that its pods have.
_ENDPOINTS = {
    "catalog": (),
    "predictor": ("catalog",),
    "simulator": ("catalog", "predictor"),
    "profiler": ("catalog",),
}


def _callers() -> str:
    """Return who may do what, as the pods' variable says it."""
    (callers,) = (
        operation["value"]["value"]
        for operation in yaml.safe_load(_PATCH.read_text(encoding="utf-8"))
        if operation["value"]["name"] == "FORETOKEN_SERVER__CALLERS"
    )
    return str(callers)


class _Services:
    """Processes with identities of one authority, and clients of others."""

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        self._folder = folder
        self._authority = Authority(folder)
        self._identities: dict[str, Identity] = {}
        self.addresses: dict[str, str] = {}
        for name in _ENDPOINTS:
            self.addresses[name] = self._start(name, closing)

    def show(self, name: str) -> Mapping[str, str]:
        """Return the files by which a caller of that name shows who it is."""
        if name not in self._identities:
            uri = f"spiffe://foretoken/{name}"
            self._identities[name] = self._authority.issue(name, uri)
        own = self._identities[name]
        return {
            "ca_file": str(self._authority.certificate),
            "cert_file": str(own.certificate),
            "key_file": str(own.key),
        }

    def options(self, service: str, caller: str) -> ChannelOptions:
        return ChannelOptions(address=self.addresses[service], **self.show(caller))  # type: ignore[arg-type]

    def _start(self, name: str, closing: ExitStack) -> str:
        shown = self.show(name)
        content = {
            "home": str(self._folder / f"home-{name}"),
            "endpoints": {other: self.addresses[other] for other in _ENDPOINTS[name]},
            "client": dict(shown),
            "server": {
                "port": 0,
                "metrics_port": -1,
                "tls_certificate_file": shown["cert_file"],
                "tls_key_file": shown["key_file"],
                "tls_client_ca_file": shown["ca_file"],
                "callers": yaml.safe_load(_callers()),
            },
        }
        config = self._folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(content))
        command = [sys.executable, "-m", "foretoken.app", "--config", str(config), "serve", name]
        process = closing.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        )
        closing.callback(process.terminate)
        assert process.stdout is not None
        return process.stdout.readline().removeprefix("serving ").strip()


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Services]:
    with ExitStack() as closing:
        yield _Services(tmp_path_factory.mktemp("secured"), closing)


def test_the_roles_of_pods_are_enough_for_all_they_do(services: _Services) -> None:
    """A person with the role of one profiles, trains, simulates; the services call each other."""
    config = AppConfig(
        endpoints=EndpointsConfig(**services.addresses), client=services.show("client")
    )
    request = ProfileRequest(device="cpu", operators=("rms_norm",), quick=True)
    with Composition(config) as composition:
        foretoken = composition.foretoken(*_ENDPOINTS)
        # What a busy machine disturbed is flagged, and nothing learns from it.
        for _ in range(5):
            assert foretoken.profile(request).num_measured > 0
            covered = {entry.operator: entry for entry in foretoken.coverage()}["rms_norm"]
            if covered.num_flagged < covered.num_rows:
                break
        trained = foretoken.train()
        assert trained.num_rows > 0
        workload = replace(_serving().workload, num_requests=5, rate_rps=5.0)
        simulated = foretoken.simulate_serving(replace(_serving(), workload=workload))
        assert trained.model_version == simulated.model_version
        for _ in range(100):
            if kept := [result.job_id for result in foretoken.list_results()]:
                break
            time.sleep(0.1)
        assert [simulated.job_id] == kept
    with (
        PredictorClient.connect(services.options("predictor", "client")) as predictor,
        pytest.raises(NotAllowedError, match="ActivateModel needs the right `activate`"),
    ):
        predictor.activate_model(trained.model_version)
    with PredictorClient.connect(services.options("predictor", "admin")) as predictor:
        activated = predictor.activate_model(trained.model_version)
    assert trained.model_version == activated.version


def test_a_backup_is_taken_by_who_may_take_it(services: _Services) -> None:
    with CatalogClient.connect(services.options("catalog", "catalog-backup")) as catalog:
        assert sum(len(chunk) for chunk in catalog.backup()) > 0
        with pytest.raises(NotAllowedError, match="ListRuns needs the right `read`"):
            catalog.list_runs()
    for caller in ("client", "profiler", "predictor", "simulator"):
        with (
            CatalogClient.connect(services.options("catalog", caller)) as catalog,
            pytest.raises(NotAllowedError, match="Backup needs the right `backup`"),
        ):
            list(catalog.backup())


def test_what_changes_every_answer_takes_an_admin(services: _Services) -> None:
    with (
        PredictorClient.connect(services.options("predictor", "client")) as predictor,
        pytest.raises(NotAllowedError, match="ActivateModel needs the right `activate`"),
    ):
        predictor.activate_model("unknown")
    # Who may is let through to the models, of which there are none yet or others.
    with (
        PredictorClient.connect(services.options("predictor", "admin")) as predictor,
        pytest.raises(UnknownModelVersionError, match="unknown"),
    ):
        predictor.activate_model("unknown")
