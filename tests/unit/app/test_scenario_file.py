"""Scenario files: what they say is read, and the documents have their keys."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from foretoken.app.cli.state import scenario_changes
from foretoken.app.scenario_file import (
    BLOCKS,
    read_serving_scenario,
    read_training_scenario,
    render_keys,
)
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownModelError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.models.architecture import find_model
from foretoken.domain.requests.option import describe, option
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.domain.requests.workload import Request

_SCENARIOS = Path(__file__).resolve().parents[3] / "docs" / "examples"


@pytest.mark.parametrize(
    "path",
    sorted((*_SCENARIOS.glob("serving*.yaml"), *_SCENARIOS.glob("training*.yaml"))),
    ids=lambda path: path.stem,
)
def test_every_documented_scenario_can_be_read(path: Path) -> None:
    read = read_serving_scenario if path.name.startswith("serving") else read_training_scenario
    assert read(path, {}).name == path.stem


def test_a_flag_changes_one_key(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("model: tiny-llama\ndevice: cpu\ndtype: fp32\nengine: {max_num_seqs: 4}\n")
    scenario = read_serving_scenario(path, {"engine.rules.block_size": 32, "seed": 7})
    assert scenario.dtype is DType.FP32
    assert scenario.engine.max_num_seqs == 4
    assert scenario.engine.resolve().block_size == 32
    assert scenario.seed == 7


def test_a_flag_of_null_takes_back_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("model: tiny-llama\ndevice: cpu\ncalibration: {step_factor: 1.1}\n")
    assert read_training_scenario(path, {}).calibration is not None
    assert read_training_scenario(path, {"calibration": None}).calibration is None
    assert read_training_scenario(path, scenario_changes(["calibration="])).calibration is None
    assert read_training_scenario(path, scenario_changes(["topology="])).topology == ""
    with pytest.raises(InvalidRequestError, match="device: expected str, found None"):
        read_training_scenario(path, {"device": None})


@pytest.mark.parametrize("key", ["module_times", "calibration"])
def test_a_file_that_is_not_there_is_an_error_of_its_key_in_one_line(
    tmp_path: Path, key: str
) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(f"model: tiny-llama\ndevice: cpu\n{key}: absent.yaml\n")
    with pytest.raises(InvalidRequestError) as caught:
        read_training_scenario(path, {})
    assert caught.value.message.startswith(f"{key}: ")
    assert caught.value.message.count("absent.yaml") == 1
    (tmp_path / "absent.yaml").write_text("a: [\n  b: *c\n")
    with pytest.raises(InvalidRequestError, match="alias") as caught:
        read_training_scenario(path, {})
    assert "\n" not in caught.value.message


def test_a_trace_beside_the_file_is_loaded_inline(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,10,2\n1.5,20,3\n"
    )
    path = tmp_path / "s.yaml"
    path.write_text(
        "model: tiny-llama\ndevice: cpu\nworkload: {arrival: trace, trace_path: t.csv}\n"
    )
    assert read_serving_scenario(path, {}).workload.trace_requests == (
        Request(arrival_s=0.0, num_prefill_tokens=10, num_decode_tokens=2),
        Request(arrival_s=1.5, num_prefill_tokens=20, num_decode_tokens=3),
    )


def test_a_hugging_face_config_beside_the_file_is_a_model(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "s.yaml"
    path.write_text("model: config.json\ndevice: cpu\n")
    assert read_training_scenario(path, {}).model.hidden == 64


def test_an_unknown_key_is_an_error_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("model: tiny-llama\ndevice: cpu\nengine: {max_seqs: 4}\n")
    with pytest.raises(InvalidRequestError, match=r"engine\.max_seqs: unknown key"):
        read_serving_scenario(path, {})


def test_an_unknown_model_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("model: lama-3-8b\ndevice: cpu\n")
    with pytest.raises(UnknownModelError, match="llama-3-8b"):
        read_serving_scenario(path, {})


def test_a_flag_cannot_lead_through_what_is_no_section(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("model: tiny-llama\ndevice: cpu\n")
    with pytest.raises(InvalidRequestError, match=r"model\.hidden: model is not a section"):
        read_serving_scenario(path, {"model.hidden": 64})


def test_a_draft_model_is_named_as_the_model_is() -> None:
    scenario = read_serving_scenario(_SCENARIOS / "serving-speculative.yaml", {})
    assert scenario.speculative is not None
    assert scenario.speculative.draft_model == find_model("llama-3.2-1b")


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
