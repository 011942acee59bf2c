"""A field that is added to a scenario is a key of its file, and of the document that lists keys."""

from dataclasses import dataclass, field
from typing import Any

import yaml

from foretoken.app.scenario_keys import BLOCKS, render_keys
from foretoken.domain import schema
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.option import describe, option
from foretoken.domain.requests.scenario import TrainingScenario


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weather:
    wind_m_per_s: float = option(0.5, "how fast it blows")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Larger(TrainingScenario):
    num_sails: int = option(2, "what it is moved by")
    weather: _Weather = field(default_factory=_Weather, metadata=describe("what is outside"))


def test_an_added_field_is_shown_with_its_default_and_its_description() -> None:
    lines = list(render_keys(_Larger))
    assert lines[-3:] == [
        "num_sails: 2  # what it is moved by",
        "weather:  # what is outside",
        "  wind_m_per_s: 0.5  # how fast it blows",
    ]


def test_an_added_field_is_read_from_a_file() -> None:
    content: dict[str, Any] = yaml.safe_load("\n".join(render_keys(_Larger)))
    content |= {"model": find_model(content["model"]), "num_sails": 3}
    assert 3 == schema.decode(_Larger, content).num_sails


def test_every_key_that_has_a_description_is_one_line() -> None:
    for cls in BLOCKS.values():
        content = yaml.safe_load("\n".join(render_keys(cls)))
        assert set(content) <= set(schema.field_types(cls))
        assert all("  #  " not in line for line in render_keys(cls))
