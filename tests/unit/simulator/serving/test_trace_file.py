import gzip
import logging
from pathlib import Path

import pytest

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.requests.workload import Request
from foretoken.simulator.workload.trace import load_trace

_HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
_REQUEST = Request(arrival_s=0.5, num_prefill_tokens=7, num_decode_tokens=3)


def _write(folder: Path, content: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    path = _write(tmp_path, "id,num_decode_tokens,arrived_at,num_prefill_tokens\na,3,0.5,7\n\n")
    assert load_trace(path).requests == (_REQUEST,)


@pytest.mark.parametrize(
    "content",
    [
        "\ufeff" + _HEADER + "0.5,7,3\n",
        _HEADER.replace(",", ";") + "0.5;7;3\n",
        _HEADER.replace(",", "\t").upper() + "0.5\t7\t3",
        '"arrived_at", num_prefill_tokens ,num_decode_tokens\r\n"0.5",7.0,3\r\n',
    ],
)
def test_spreadsheets_may_have_written_it(tmp_path: Path, content: str) -> None:
    assert load_trace(_write(tmp_path, content)).requests == (_REQUEST,)


def test_a_compressed_trace_is_known_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(gzip.compress((_HEADER + "0.5,7,3\n").encode()))
    assert load_trace(path).requests == (_REQUEST,)


def test_a_format_can_be_forced(tmp_path: Path) -> None:
    """The columns of Vidur are a generic trace too."""
    path = _write(tmp_path, _HEADER + "0.5,7,3\n")
    assert load_trace(path, "generic").requests == load_trace(path, "vidur").requests
    with pytest.raises(InvalidRequestError, match=r"trace\.csv:1: the header lacks timestamp"):
        load_trace(path, "azure")
    with pytest.raises(UnknownPluginError, match="vidur"):
        load_trace(path, "vidor")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_HEADER + "0,1,2\n0.5,x,2\n", r"csv:3: num_prefill_tokens: expected a number, found 'x'"),
        (_HEADER + "0,1\n", r"trace\.csv:2: num_decode_tokens is missing"),
        (_HEADER + "0,1,2,3\n", r"trace\.csv:2: expected 3 columns, found 4"),
        (_HEADER + "-1,1,2\n", r"trace\.csv:2: arrived_at: expected a time of at least 0"),
        (_HEADER + "nan,1,2\n", r"trace\.csv:2: arrived_at: expected a time of at least 0"),
        (_HEADER + "0,1,0\n", r"trace\.csv:2: num_decode_tokens: expected a whole number from 1"),
        (_HEADER + "0,1.5,2\n", r"trace\.csv:2: num_prefill_tokens: expected a whole number"),
        (_HEADER + "0,inf,2\n", r"trace\.csv:2: num_prefill_tokens: expected a whole number"),
        (_HEADER + "0,1e12,2\n", r"trace\.csv:2: num_prefill_tokens: expected a whole number"),
        (_HEADER, "holds no requests"),
        ("arrived_at,num_prefill_tokens\n0,1\n", r"trace\.csv:1: no known trace has the columns"),
        ("arrived_at,arrived_at\n", r"trace\.csv:1: a column name is there twice"),
        ("", r"trace\.csv:1: expected a header or a JSON object"),
        ('{"a": 1}\n', r"trace\.csv:1: no known trace has the columns a \(azure: TIMESTAMP"),
        ('[{"conversations": []}]', r"trace\.csv:1: a JSON list; .* ShareGPT's hold text"),
        ('{"timestamp"\n', r"trace\.csv:1: expected a JSON object"),
        ("\x00\x01", "no known trace has"),
    ],
)
def test_a_bad_trace_names_file_and_line(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        load_trace(_write(tmp_path, content))
    assert [violation.field for violation in caught.value.violations] == ["trace_path"]


@pytest.mark.parametrize("line", ['["a"]', "3", '{"timestamp": 1', "nope"])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str) -> None:
    good = '{"timestamp": 0, "input_length": 1, "output_length": 1}\n\n'
    with pytest.raises(InvalidRequestError, match=r"t\.jsonl:3: expected a JSON object"):
        load_trace(_write(tmp_path, good + line, "t.jsonl"))


def test_a_key_of_blocks_with_too_many_digits_is_another_column(tmp_path: Path) -> None:
    """Python refuses to make a number of them."""
    key = "prompt_block_ids_" + "1" * 5000
    line = f'{{"arrival_s": 0.5, "input_tokens": 7, "output_tokens": 3, "{key}": [1]}}'
    assert load_trace(_write(tmp_path, line, "t.jsonl")).requests == (_REQUEST,)


def test_a_file_that_cannot_be_read_is_an_invalid_request(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(InvalidRequestError, match="cannot read"):
            load_trace(path)
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(_HEADER.encode() + b"0,1,2\n" * 99)[:-8])
    with pytest.raises(InvalidRequestError, match=r"cannot read .*broken\.gz"):
        load_trace(broken)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequestError, match=r"cannot read .*binary\.csv"):
        load_trace(binary)


def test_what_was_left_out_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = _write(tmp_path, "Timestamp,Request tokens,Response tokens\n5,4,2\n6,4,0\n")
    with caplog.at_level(logging.WARNING):
        assert load_trace(path).num_skipped == 1
    assert "rows=1 of=2" in caplog.text


def test_the_splitwise_traces_load(shared_data: Path) -> None:
    content = load_trace(shared_data / "vidur" / "traces" / "splitwise_conv_first2000.csv")
    assert len(content.requests) == 2000
    assert content.requests[1] == Request(
        arrival_s=4.314579, num_prefill_tokens=396, num_decode_tokens=109
    )
