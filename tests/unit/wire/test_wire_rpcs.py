"""The table of rpcs, their registration, pages of lists, and names decoded from messages."""

import inspect
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from foretoken.api.profiler.v1 import profiler_service_pb2 as profiler_pb2
from foretoken.api.simulator.v1 import simulator_service_pb2 as simulator_pb2
from foretoken.api.types.v1 import scenario_pb2, search_pb2
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.domain.models.load import load_model
from foretoken.domain.ports import JobsPort, ProfilerPort
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import ServingSearchRequest
from foretoken.wire import codec
from foretoken.wire.rights import Right
from foretoken.wire.rpc import Pages, RpcTable, Unary, messages_of
from foretoken.wire.rpcs import TABLES, JobRpcs, ProfilerRpcs, SimulatorRpcs
from foretoken.wire.serving import register_service, take_page


@pytest.mark.parametrize("table", TABLES)
def test_a_list_has_pages_where_its_messages_have(table: type[RpcTable]) -> None:
    for messages in messages_of(table).values():
        has_pages = "next_page_token" in messages.reply_class.DESCRIPTOR.fields_by_name
        assert has_pages == isinstance(messages.line, Pages)


def test_a_line_of_another_name_is_refused() -> None:
    with pytest.raises(TypeError, match="fetch_job is of the method get_job"):
        type("Misnamed", (RpcTable,), {"fetch_job": Unary(JobsPort.get_job, Right.READ)})


def test_a_table_that_lacks_an_rpc_is_refused() -> None:
    class Lacking(JobRpcs, service=ProfilerRpcs.service):
        list_local_devices = Unary(ProfilerPort.list_local_devices, Right.READ)

    with pytest.raises(TypeError, match="differ in CreateClosure, CreateGraphProfile"):
        messages_of(Lacking)


def test_a_parameter_that_the_proto_lacks_is_refused() -> None:
    class Port:
        def get_job(self, job_id: str, verbose: bool) -> None: ...

    class Wrong(ProfilerRpcs, service=ProfilerRpcs.service):
        get_job = Unary(Port.get_job, Right.READ)  # type: ignore[assignment]

    with pytest.raises(TypeError, match="GetJobRequest has no field verbose"):
        messages_of(Wrong)


def test_parameters_are_bound_as_python_binds_them() -> None:
    watch = messages_of(SimulatorRpcs)["watch_serving_search"]
    assert ("a", 0) == watch.bind(("a",), {})
    assert ("a", 2) == watch.bind((), {"first": 2, "job_id": "a"})
    with pytest.raises(TypeError, match="job"):
        watch.bind((), {"job": "a"})
    with pytest.raises(TypeError, match="too many"):
        watch.bind(("a", 2, 3), {})


def test_a_request_without_what_it_must_hold_is_refused() -> None:
    messages = messages_of(ProfilerRpcs)["create_profile"]
    with pytest.raises(InvalidRequestError) as caught:
        messages.decode_request(profiler_pb2.CreateProfileRequest())
    assert ["profile"] == [violation.field for violation in caught.value.violations]
    asked = ProfileRequest(device="cpu")
    assert [asked] == messages.decode_request(messages.encode_request((asked,)))


def test_every_line_is_of_a_documented_method() -> None:
    """Both clients show the port's documentation."""
    for table in TABLES:
        for line in table.lines().values():
            assert inspect.getdoc(line.method)


def _pages(names: list[str], size: int) -> list[list[str]]:
    pages, token = [], ""
    while True:
        page, token = take_page(names, str, size, token)
        pages.append(list(page))
        if not token:
            return pages


@pytest.mark.parametrize(
    ("names", "size", "expected"),
    [
        ([], 2, [[]]),
        (["c"], 2, [["c"]]),
        (["d", "c"], 2, [["d", "c"]]),
        (["e", "d", "c"], 2, [["e", "d"], ["c"]]),
    ],
)
def test_pages_hold_everything_once(names: list[str], size: int, expected: list[list[str]]) -> None:
    assert expected == _pages(names, size)


def test_the_default_page_has_a_hundred() -> None:
    assert [100, 100, 50] == [len(page) for page in _pages([str(n) for n in range(250)], 0)]


def test_a_page_has_a_thousand_at_most() -> None:
    assert [1_000, 500] == [len(page) for page in _pages([str(n) for n in range(1_500)], 10**9)]


def test_what_comes_in_front_between_two_pages_repeats_nothing() -> None:
    """Lists are newest first, so new items move the old ones back."""
    _, token = take_page(["c", "b", "a"], str, 2, "")
    assert (["a"], "") == take_page(["d", "c", "b", "a"], str, 2, token)


@pytest.mark.parametrize(
    ("size", "token", "field"), [(-1, "", "page_size"), (1, "x", "page_token")]
)
def test_a_page_that_cannot_be_is_refused(size: int, token: str, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        take_page(["b", "a"], str, size, token)
    assert [field] == [violation.field for violation in caught.value.violations]


def test_a_servicer_that_lacks_an_rpc_cannot_be_registered() -> None:
    """Else its callers would be the first to notice."""
    server = grpc.server(ThreadPoolExecutor(1))
    service = simulator_pb2.DESCRIPTOR.services_by_name["SimulatorService"]
    with pytest.raises(AttributeError, match="create_serving_simulation"):
        register_service(server, service, object())


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
