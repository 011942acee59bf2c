"""The table of rpcs fits the protos and the ports."""

import inspect

import pytest

from foretoken.api.profiler.v1 import profiler_service_pb2 as profiler_pb2
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.domain.ports import JobsPort, ProfilerPort
from foretoken.wire.rpc import Pages, RpcTable, Unary
from foretoken.wire.rpc_messages import messages_of
from foretoken.wire.rpcs import TABLES, JobRpcs, ProfilerRpcs, SimulatorRpcs


@pytest.mark.parametrize("table", TABLES)
def test_a_list_has_pages_where_its_messages_have(table: type[RpcTable]) -> None:
    for messages in messages_of(table).values():
        has_pages = "next_page_token" in messages.reply_class.DESCRIPTOR.fields_by_name
        assert has_pages == isinstance(messages.line, Pages)


def test_a_line_of_another_name_is_refused() -> None:
    with pytest.raises(TypeError, match="fetch_job is of the method get_job"):
        type("Misnamed", (RpcTable,), {"fetch_job": Unary(JobsPort.get_job)})


def test_a_table_that_lacks_an_rpc_is_refused() -> None:
    class Lacking(JobRpcs, service=ProfilerRpcs.service):
        list_local_devices = Unary(ProfilerPort.list_local_devices)

    with pytest.raises(TypeError, match="differ in CreateClosure, CreateGraphProfile"):
        messages_of(Lacking)


def test_a_parameter_that_the_proto_lacks_is_refused() -> None:
    class Port:
        def get_job(self, job_id: str, verbose: bool) -> None: ...

    class Wrong(ProfilerRpcs, service=ProfilerRpcs.service):
        get_job = Unary(Port.get_job)  # type: ignore[assignment]

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
