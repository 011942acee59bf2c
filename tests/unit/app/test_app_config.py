"""The configuration, and what is composed by it."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from foretoken.app.compose import Composition, on_kubernetes
from foretoken.app.config import AppConfig, EndpointsConfig, load_config
from foretoken.client.channel_options import ChannelOptions
from foretoken.domain.errors import InvalidRequestError

_AT = EndpointsConfig(catalog="localhost:1")


def test_nothing_given_is_all_embedded() -> None:
    config = load_config(None, {}, {})
    assert config == AppConfig()
    assert config.endpoints.catalog == "embedded"


def test_flag_wins_over_environment_over_file(tmp_path: Path) -> None:
    path = tmp_path / "foretoken.yaml"
    path.write_text("home: /from-file\nserver: {port: 1, host: file, max_workers: 3}\n")
    environment = {"FORETOKEN_SERVER__PORT": "2", "FORETOKEN_SERVER__HOST": "environment"}
    config = load_config(path, environment, {"server.port": 4, "home": None})
    assert config.home == "/from-file"
    assert config.server.max_workers == 3
    assert config.server.host == "environment"
    assert config.server.port == 4


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "foretoken.yaml"
    path.write_text("endpoints: {catalog: 'dns:///catalog:50051'}\n")
    config = load_config(None, {"FORETOKEN_CONFIG": str(path)}, {})
    assert config.endpoints.catalog == "dns:///catalog:50051"


def test_an_unknown_key_is_an_error_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "foretoken.yaml"
    path.write_text("server: {prot: 1}\n")
    with pytest.raises(InvalidRequestError, match=r"server\.prot: unknown key"):
        load_config(path, {}, {})


def test_a_wrong_type_is_an_error_with_its_path() -> None:
    with pytest.raises(InvalidRequestError, match=r"server\.port: expected int"):
        load_config(None, {"FORETOKEN_SERVER__PORT": "many"}, {})


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot read"):
        load_config(tmp_path / "absent.yaml", {}, {})


def test_broken_yaml_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "foretoken.yaml"
    path.write_text("server: {port: [1\n")
    with pytest.raises(InvalidRequestError, match=r"foretoken\.yaml: not valid YAML"):
        load_config(path, {}, {})


def test_variables_of_a_cluster_are_not_settings() -> None:
    environment = {"FORETOKEN_CATALOG_PORT": "tcp://10.0.0.1:50051", "FORETOKEN_HOME": "/data"}
    assert load_config(None, environment, {}) == AppConfig(home="/data")


def test_an_empty_variable_is_not_set() -> None:
    environment = {"FORETOKEN_HOME": "", "FORETOKEN_SERVER__PORT": "", "FORETOKEN_CONFIG": ""}
    assert load_config(None, environment, {}) == AppConfig()


def test_a_folder_is_not_read_as_yaml() -> None:
    assert load_config(None, {"FORETOKEN_HOME": "/data: 1"}, {}).home == "/data: 1"


def test_a_value_that_is_not_yaml_names_its_variable() -> None:
    with pytest.raises(InvalidRequestError, match="FORETOKEN_SERVER__PORT: not valid YAML"):
        load_config(None, {"FORETOKEN_SERVER__PORT": "[1"}, {})


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("client.tls_ca_file", "ca.crt", r"client\.tls_ca_file: unknown key"),
        ("client.deadline_s", "soon", r"client\.deadline_s: expected float"),
        ("client.address", "elsewhere:1", r"client\.address: addresses stand in endpoints"),
        ("log.level", "LOUD", r"log\.level: is one of"),
        ("log.format", "xml", r"log\.format: must be one of text, json"),
        ("server.tls_key_file", "key.pem", r"server\.tls_certificate_file: TLS needs"),
        ("server.tls_client_ca_file", "ca.pem", r"server\.tls_client_ca_file: clients show"),
    ],
)
def test_what_cannot_work_is_refused_at_once(key: str, value: str, problem: str) -> None:
    """Before anything is opened, whichever command was called."""
    with pytest.raises(InvalidRequestError, match=problem):
        load_config(None, {}, {key: value})


@pytest.mark.parametrize(
    ("key", "port", "problem"),
    [
        ("server.port", 65_536, r"server\.port: is from 0 to 65535"),
        ("server.metrics_port", -2, r"server\.metrics_port: is from -1 to 65535"),
    ],
)
def test_a_port_that_does_not_exist_is_refused(key: str, port: int, problem: str) -> None:
    """The socket would take another one, without a word."""
    with pytest.raises(InvalidRequestError, match=problem):
        load_config(None, {}, {key: port})


def test_the_client_section_reaches_the_channel() -> None:
    config = load_config(None, {"FORETOKEN_CLIENT__DEADLINE_S": "3"}, {"client.ca_file": "ca.crt"})
    expected = ChannelOptions(address="here:1", deadline_s=3.0, ca_file="ca.crt")
    assert expected == config.channel_options("here:1")


def test_the_number_of_shards_is_the_flags_or_the_configured() -> None:
    section = {"num_threads": 2, "kubernetes": {"image": "here", "num_shards": 3}}
    config = AppConfig(profiler=section)
    assert {**section, "place": "kubernetes"} == on_kubernetes(config).profiler
    assert 8 == on_kubernetes(config, 8).profiler["kubernetes"]["num_shards"]
    assert 3 == config.profiler["kubernetes"]["num_shards"]


@pytest.mark.parametrize(
    ("section", "endpoints", "message"),
    [
        ({"place": "mars"}, _AT, "profiler.place: is one of local, kubernetes"),
        ({"place": "kubernetes"}, EndpointsConfig(), "cannot record in a catalog inside"),
        ({"place": "kubernetes", "kubernetes": {"imag": ""}}, _AT, "did you mean image"),
        (
            {"place": "kubernetes", "kubernetes": {"kubeconfig": "/nowhere/config"}},
            _AT,
            "no way into a cluster",
        ),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, section: Mapping[str, object], endpoints: EndpointsConfig, message: str
) -> None:
    config = AppConfig(home=str(tmp_path), endpoints=endpoints, profiler=section)
    with Composition(config) as composition, pytest.raises(InvalidRequestError, match=message):
        _ = composition.profiler


def test_credentials_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    config = AppConfig(
        home=str(tmp_path),
        endpoints=_AT,
        client={"ca_file": "/nowhere/ca.pem"},
        profiler={"place": "kubernetes"},
    )
    with Composition(config) as composition, pytest.raises(InvalidRequestError, match=r"ca\.pem"):
        _ = composition.profiler
