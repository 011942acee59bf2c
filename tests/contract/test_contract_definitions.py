"""What requests can name is listed, and a model may be named over the wire."""

import json
from pathlib import Path

import pytest
from contract_reach import Reach
from contract_scenarios import SERVING, TINY_MODEL
from job_simulator import JobSimulator

from foretoken.api.types.v1 import scenario_pb2
from foretoken.client.services import SimulatorClient
from foretoken.domain.definition import Definition, list_definitions
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import all_models, find_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator import servicer
from foretoken.wire import codec


class _Listing(JobSimulator):
    def list_definitions(self, kind: str) -> tuple[Definition, ...]:
        return list_definitions(kind)


def test_names_are_listed_over_several_pages(reach: Reach, tmp_path: Path) -> None:
    simulator = reach(_Listing(tmp_path), servicer.register, SimulatorClient.connect)
    models = simulator.list_definitions("models")
    assert sorted(all_models()) == [model.name for model in models]
    assert find_model("llama-3.1-8b").hidden == next(
        json.loads(model.content_json)["hidden"] for model in models if model.name == "llama-3.1-8b"
    )
    with pytest.raises(InvalidRequestError, match="kind: is one of models, devices"):
        simulator.list_definitions("colours")


@pytest.mark.parametrize(
    "kind", ["models", "devices", "topologies", "engines", "trainers", "price_lists", "datasets"]
)
def test_every_kind_has_names_that_say_what_they_stand_for(kind: str) -> None:
    found = list_definitions(kind)
    assert [] != found
    assert all(json.loads(one.content_json) for one in found)


def _named(text: str) -> ServingScenario:
    message = scenario_pb2.ServingScenario(model_ref=text, device="a30")
    return codec.decode(message, ServingScenario)


def test_a_model_may_be_named_or_pasted() -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": TINY_MODEL.num_layers,
        "hidden_size": TINY_MODEL.hidden,
        "num_attention_heads": TINY_MODEL.num_heads,
        "num_key_value_heads": TINY_MODEL.num_kv_heads,
        "intermediate_size": TINY_MODEL.intermediate,
        "vocab_size": TINY_MODEL.vocab,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    assert find_model("llama-3.1-8b") == _named("llama-3.1-8b").model
    assert TINY_MODEL.num_layers == _named(json.dumps(config)).model.num_layers


def test_a_model_that_is_sent_counts_before_its_name() -> None:
    message = codec.encode(SERVING, scenario_pb2.ServingScenario)
    message.model_ref = "llama-3.1-8b"
    assert TINY_MODEL == codec.decode(message, ServingScenario).model


@pytest.mark.parametrize("text", ["no-such-model", "/etc/hostname", "./folder", "{", '{"a": 1}'])
def test_a_name_of_no_preset_is_refused_and_no_file_read(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        _named(text)
    assert ["model_ref"] == [violation.field for violation in caught.value.violations]
