"""Which profiler a configuration asks for, and what a cluster's must know."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from foretoken.app.compose import Composition, on_kubernetes
from foretoken.app.config import AppConfig, EndpointsConfig
from foretoken.domain.errors import InvalidRequestError

_AT = EndpointsConfig(catalog="localhost:1")


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
