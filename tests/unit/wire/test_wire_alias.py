"""A message may name a device as drivers and people do; what it is decoded to does not."""

from foretoken.api.types.v1 import scenario_pb2, search_pb2
from foretoken.domain.models.load import load_model
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingSearchRequest
from foretoken.wire import codec


def test_other_names_of_devices_are_resolved_where_a_message_is_decoded() -> None:
    plain = ServingScenario(model=load_model("tiny-llama"), device="a30")
    scenario = codec.encode(plain, scenario_pb2.ServingScenario)
    scenario.device = "NVIDIA H200"
    space = search_pb2.ServingSpace(devices=["h200", "h100"], usd_per_hour={"h200": 3.5})
    message = search_pb2.ServingSearchRequest(scenario=scenario, space=space)
    decoded = codec.decode(message, ServingSearchRequest)
    assert decoded.scenario.device == "h200_sxm"
    assert decoded.space.devices == ("h200_sxm", "h100_sxm")
    assert decoded.space.usd_per_hour == {"h200_sxm": 3.5}
