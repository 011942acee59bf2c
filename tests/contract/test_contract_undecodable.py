"""Bytes that are no message: every method of every service says so, and counts them."""

import logging
import random
from collections.abc import Iterator

import grpc
import pytest
from contract_rows import make_run
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from prometheus_client import REGISTRY
from raw_calls import RawCalls, methods, path

from foretoken.app.config import SERVICES, AppConfig, ServerConfig
from foretoken.app.serve import start_server
from foretoken.client.sending import run_message

_METHODS = methods()


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawCalls]:
    config = AppConfig(home=str(tmp_path_factory.mktemp("home")), server=ServerConfig(port=0))
    running = start_server(SERVICES, config)
    with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        yield RawCalls(channel)
    running.stop(ServerConfig(grace_s=0.0))


def _num_undecodable(method: MethodDescriptor) -> float:
    service = path(method).split(".")[2] if "foretoken" in path(method) else ""
    value = REGISTRY.get_sample_value(
        f"foretoken_{service}_undecodable_messages_total", {"method": method.name}
    )
    return value or 0.0


def _draw_bytes(method: MethodDescriptor) -> list[bytes]:
    """Some bytes that the method's message cannot be, of many lengths, and a few fixed ones."""
    draw = random.Random(path(method))  # noqa: S311 - any bytes
    found = [b"\xff", b"not a message", b"\x0a\xff\xff\xff\xff\x0f", bytes(range(256))]
    found += [draw.randbytes(length) for length in (2, 5, 13, 1_000, 100_000)]
    decode = GetMessageClass(method.input_type).FromString
    return [content for content in found if not _is_message(decode, content)]


def _is_message(decode: object, content: bytes) -> bool:
    try:
        decode(content)  # type: ignore[operator]
    except DecodeError:
        return False
    return True


@pytest.mark.parametrize("method", _METHODS, ids=lambda method: path(method).rpartition(".")[2])
def test_bytes_that_are_no_message_are_an_invalid_argument(
    raw: RawCalls, method: MethodDescriptor, caplog: pytest.LogCaptureFixture
) -> None:
    contents = _draw_bytes(method)
    assert len(contents) >= 5
    before = _num_undecodable(method)
    with caplog.at_level(logging.INFO):
        answers = [raw.send(path(method), content) for content in contents]
    assert {code for code, _ in answers} == {grpc.StatusCode.INVALID_ARGUMENT}
    for content, (_, details) in zip(contents, answers, strict=True):
        assert f"{len(content)} bytes were sent to {path(method)} that are no message" in details
    assert {"foretoken.access", "foretoken.audit"} >= {record.name for record in caplog.records}
    is_ours = "foretoken" in path(method)
    assert _num_undecodable(method) - before == (len(contents) if is_ours else 0)


def test_bytes_that_are_no_message_in_the_middle_of_a_stream(
    raw: RawCalls, caplog: pytest.LogCaptureFixture
) -> None:
    method = "/foretoken.api.catalog.v1.CatalogService/Record"
    run = run_message(make_run()).SerializeToString()
    with caplog.at_level(logging.INFO, logger="grpc"):
        code, details = raw.send(method, run, b"\xff\xff")
    assert (grpc.StatusCode.INVALID_ARGUMENT, True) == (code, "2 bytes were sent" in details)
    assert [] == caplog.records


@pytest.mark.parametrize("method", _METHODS, ids=lambda method: path(method).rpartition(".")[2])
def test_a_call_without_a_message_has_a_status(
    raw: RawCalls, method: MethodDescriptor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="grpc"):
        code, _ = raw.send(path(method))
    is_reflection = "reflection" in path(method)
    expected = grpc.StatusCode.OK if is_reflection else grpc.StatusCode.INVALID_ARGUMENT
    assert expected == code
    assert [] == caplog.records
