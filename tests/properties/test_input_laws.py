"""Whatever a file or an option holds, it is read or refused; nothing else is raised."""

import contextlib
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foretoken.app.cli.calibrate import read_observations
from foretoken.app.cli.dim_text import parse_values, parse_whole
from foretoken.app.cli.profile import read_points
from foretoken.app.config import load_config
from foretoken.app.module_times_file import read_module_times
from foretoken.app.scenario_file import read_serving_scenario, read_training_scenario
from foretoken.client.results import open_result
from foretoken.domain import schema
from foretoken.domain.errors import ForetokenError
from foretoken.domain.hardware.price import read_price_list
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.domain.models.hf_config import load_hf_config
from foretoken.domain.plugins import parse_yaml_value, read_yaml
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.text_file import read_json, read_text
from foretoken.profiler.config_json import read_config_json
from foretoken.simulator.training.measured_file import read_measured
from foretoken.simulator.validation.measured_run import load_run
from foretoken.simulator.validation.training_run import read_truth
from foretoken.simulator.workload.trace import load_trace

_EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
_POINTS = b"operator,dtype,phase,m,n,k\ngemm,bf16,forward,64,4096,4096\nrms_norm,fp16,forward,,,\n"
_DOMAIN = Path(__file__).resolve().parents[2] / "clients/python/src/foretoken/domain"
_PRICES = _DOMAIN / "hardware" / "prices"

# Numbers that Python can say and few others can hold, and values that are none of what they claim.
_STRANGE = (
    b"1" * 310,
    b"-" + b"9" * 310,
    b"1" * 5_000,
    b"0x" + b"f" * 5_000,
    b"1e999",
    b"-1e999",
    b".inf",
    b".nan",
    b"NaN",
    b"Infinity",
    b"1:" * 200 + b"1.0",
    b"!!int x",
    b"!!float x",
    b"!!timestamp x",
    b"!!bool x",
    b'!!int ""',
    b"2001-13-45",
    b"9" * 30 + b"-01-01",
    b"null",
    b"true",
    b"",
    b'""',
    b"[]",
    b"{}",
    b"[" * 200 + b"]" * 200,
    b"[" * 100_000,
    b"- " * 2_000 + b"1",
    b'"\xff\xfe"',
    b"\x00",
    b"\xed\xa0\x80",
    b"&a [*a]",
    b"? [1, 2]",
)
_PLACE = re.compile(rb"\d[\d.]*|[A-Za-z_]{3,}")


@st.composite
def _spoilt(draw: st.DrawFn, original: bytes) -> bytes:
    """A file in which something else stands where a number or a word was, or which is cut short."""
    places = [match.span() for match in _PLACE.finditer(original)] or [(0, 0)]
    start, end = draw(st.sampled_from(places))
    kind = draw(st.sampled_from(("strange", "strange", "strange", "cut", "noise")))
    if kind == "cut":
        return original[:start]
    middle = draw(st.sampled_from(_STRANGE)) if kind == "strange" else draw(st.binary(max_size=20))
    return original[:start] + middle + original[end:]


_Read = Callable[[Path], object]
_DOORS: dict[str, tuple[_Read, bytes]] = {
    "serving scenario": (
        lambda path: read_serving_scenario(path, {}),
        (_EXAMPLES / "serving-cluster.yaml").read_bytes(),
    ),
    "training scenario": (
        lambda path: read_training_scenario(path, {}),
        (_EXAMPLES / "training.yaml").read_bytes(),
    ),
    "mapping": (
        lambda path: read_yaml(path, "mapping"),
        (_EXAMPLES / "apex-mapping.yaml").read_bytes(),
    ),
    "configuration": (
        lambda path: load_config(path, {}, {}),
        b"home: /x\nserver: {port: 1, budgets: {Record: 3}, drain_s: 1.5}\nlog: {level: INFO}\n",
    ),
    "prices": (read_price_list, next(iter(sorted(_PRICES.glob("*.yaml")))).read_bytes()),
    "model": (load_hf_config, (_EXAMPLES / "small-llama.json").read_bytes()),
    "config json": (
        lambda path: read_config_json(read_text(path, "config")),
        (_EXAMPLES / "small-llama.json").read_bytes(),
    ),
    "observations": (read_observations, (_EXAMPLES / "observations.json").read_bytes()),
    "points": (lambda path: list(read_points(path)), _POINTS),
    "profile request": (
        lambda path: schema.decode(ProfileRequest, read_json(path, "request")),
        b'{"device": "cpu", "operators": ["gemm"], "quick": true, "seed": 3}',
    ),
    "module times": (
        lambda path: read_module_times(path, {}),
        (_EXAMPLES / "training-modules.yaml").read_bytes(),
    ),
    "measured times": (read_measured, (_EXAMPLES / "training-calibration/steps.csv").read_bytes()),
    "truth": (read_truth, (_EXAMPLES / "measured-steps.csv").read_bytes()),
    "measured run": (load_run, (_EXAMPLES / "measured-requests.csv").read_bytes()),
    **{
        f"trace {name}": (load_trace, (_EXAMPLES / name).read_bytes())
        for name in (
            "agents-trace.jsonl",
            "azure-trace.csv",
            "blocks-trace.jsonl",
            "burstgpt-trace.csv",
            "conversation-trace.csv",
            "mooncake-trace.jsonl",
            "sessions-trace.csv",
        )
    },
    "result": (lambda path: open_result(path.read_bytes()), b"PK\x05\x06" + b"\x00" * 18),
}


def _read(door: str, content: bytes, folder: Path) -> object:
    read, _ = _DOORS[door]
    path = folder / "input"
    path.write_bytes(content)
    try:
        return read(path)
    except ForetokenError as err:
        return err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


@pytest.mark.parametrize("door", _DOORS)
def test_spoilt_files_are_read_or_refused(door: str, folder: Path) -> None:
    @given(st.data())
    def check(data: st.DataObject) -> None:
        _read(door, data.draw(_spoilt(_DOORS[door][1])), folder)

    check()


@pytest.mark.parametrize("door", _DOORS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"a: \xff\n",
        b'{"a": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"- " * 50_000,
        b"a,b\n" + b"\xff,1\n",
        b"a,b\n\x00,1\n",
        b'"' + b"x" * 200_000,
        bytes(range(256)),
        random.Random(0).randbytes(2_000),  # noqa: S311 - any bytes
    ],
    ids=lambda content: repr(content[:8]),
)
def test_files_of_another_kind_are_refused(door: str, content: bytes, folder: Path) -> None:
    """`mapping` is any YAML mapping, which none of these is."""
    assert isinstance(_read(door, content, folder), ForetokenError)


@given(st.sampled_from(_STRANGE))
@example(b"\xff")
def test_a_strange_value_of_any_setting_is_read_or_refused(value: bytes) -> None:
    """Bytes that are not UTF-8 reach Python's arguments as surrogates."""
    text = value.decode("utf-8", errors="surrogateescape")
    for attempt in (
        lambda: parse_yaml_value(text, "--set x"),
        lambda: parse_whole("m", text),
        lambda: parse_values("m", text),
        lambda: load_config(None, {"FORETOKEN_SERVER__PORT": text}, {}),
        lambda: load_config(None, {"FORETOKEN_SERVER__DRAIN_S": text}, {}),
    ):
        with contextlib.suppress(ForetokenError):
            attempt()


_Plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**310), 10**310)
    | st.floats()
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(_Plain, st.sampled_from(["model", "engine", "engine.max_num_seqs", "workload.rate_rps"]))
def test_whatever_stands_in_a_scenario_is_decoded_or_refused(value: Any, key: str) -> None:
    content: dict[str, Any] = dict(read_yaml(_EXAMPLES / "serving.yaml", "scenario"))
    section = key.partition(".")[0]
    if section != key:
        content[section] = {**content[section]}
    schema.set_key(content, key, value)
    with contextlib.suppress(ForetokenError):
        schema.decode(ServingScenario, content)


@pytest.mark.parametrize("digits", [20, 310, 4_000, 5_000])
def test_an_integer_that_nothing_holds_is_named(digits: int) -> None:
    """Where a whole number belongs, and where a real one does."""
    for cls, path in ((int, "engine.max_num_seqs"), (float, "workload.rate_rps")):
        with pytest.raises(ForetokenError, match=f"{path}: .* does not fit into 64 bits"):
            schema.decode(cls, 10**digits, path)
