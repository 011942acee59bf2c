from pathlib import Path

import pytest

from foretoken.app.config import AppConfig, load_config
from foretoken.domain.errors import InvalidRequestError


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
