"""W3C trace context: what a header says, and which request a thread works for."""

from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.wire import trace
from foretoken.wire.trace import Kind, TraceContext

_TRACE, _SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class _Recorded:
    def __init__(self, name: str, parent: TraceContext | None) -> None:
        self.name, self.parent = name, parent
        self.context = TraceContext(_TRACE, f"{id(self):016x}", is_sampled=True)
        self.ends: list[str] = []

    def set(self, name: str, value: str | float) -> None:
        pass

    def end(self, error: str = "") -> None:
        self.ends.append(error)


class _Recorder:
    def __init__(self) -> None:
        self.spans: list[_Recorded] = []

    def begin(
        self, name: str, _kind: Kind, parent: TraceContext | None, _attributes: Mapping[str, str]
    ) -> _Recorded:
        self.spans.append(_Recorded(name, parent))
        return self.spans[-1]


@pytest.fixture
def recorder() -> Iterator[_Recorder]:
    recorder = _Recorder()
    trace.install(recorder)
    yield recorder
    trace.uninstall()


@given(
    trace_id=st.integers(1, 2**128 - 1), span_id=st.integers(1, 2**64 - 1), sampled=st.booleans()
)
def test_a_header_says_what_it_was_made_of(trace_id: int, span_id: int, sampled: bool) -> None:
    context = TraceContext(f"{trace_id:032x}", f"{span_id:016x}", sampled)
    assert context == TraceContext.parse(context.traceparent)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "rubbish",
        f"00-{_TRACE}-{_SPAN}",
        f"ff-{_TRACE}-{_SPAN}-01",
        f"00-{'0' * 32}-{_SPAN}-01",
        f"00-{_TRACE}-{'0' * 16}-01",
        f"00-{_TRACE.upper()}-{_SPAN}-01",
        f"00-{_TRACE}-{_SPAN}-01\n",
    ],
)
def test_what_is_no_header_is_no_request(header: str) -> None:
    assert TraceContext.parse(header) is None


def test_a_later_version_may_say_more() -> None:
    assert TraceContext(_TRACE, _SPAN, is_sampled=True) == TraceContext.parse(
        f"01-{_TRACE}-{_SPAN}-09-more"
    )


def test_without_a_recorder_a_request_has_an_id_and_its_parts_name_it() -> None:
    assert trace.current() is None
    assert trace.headers_of(trace.begin("call", Kind.CLIENT)) is None
    request = trace.begin_request("call", Kind.SERVER)
    with trace.entered(request.context):
        assert request.context is not None
        part = trace.begin("part", Kind.CLIENT)
        assert (("traceparent", request.context.traceparent),) == trace.headers_of(part)
    assert trace.current() is None


def test_work_is_a_part_of_the_span_it_is_done_in(recorder: _Recorder) -> None:
    with trace.span("outer"), trace.span("inner"):
        pass
    outer, inner = recorder.spans
    assert (None, outer.context) == (outer.parent, inner.parent)
    assert ([""], [""]) == (outer.ends, inner.ends)


def test_a_span_ends_with_the_reason_of_what_went_wrong(recorder: _Recorder) -> None:
    with pytest.raises(InvalidRequestError), trace.span("outer"):
        raise InvalidRequestError("no")
    assert [["INVALID_REQUEST"]] == [span.ends for span in recorder.spans]
