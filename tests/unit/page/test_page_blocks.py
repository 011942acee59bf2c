"""Blocks as data, and the page that is written of them."""

import json
import re
from base64 import b64encode
from hashlib import sha256

from page_structure import parse_page

from foretoken.domain.metrics.metric import SHARE
from foretoken.domain.metrics.registry import METRICS
from foretoken.page.block import (
    Cell,
    Column,
    Figures,
    Page,
    Section,
    Table,
    Text,
    Value,
    number_text,
    to_json,
)
from foretoken.page.chart import GREEN, ORANGE, Plot
from foretoken.page.html import MOST_ROWS, asset, render, render_blocks

_HOSTILE = "</script><script>alert('x')</script><!--"
_TABLE = Table(
    columns=[
        Column.words("load"),
        Column.of(METRICS["goodput_rps"]),
        Column.of(METRICS["mfu_ratio"]),
    ],
    rows=[("low", 1.5, 0.25), (_HOSTILE, Cell(value=2, tone="alert"), float("nan"))],
)
_PLOT = Plot(title="Goodput", table=_TABLE, x="goodput_rps", y="mfu_ratio", by="load")


def _page(*blocks: object) -> Page:
    about = (("question", f"How much? {_HOSTILE}"), ("rests on", "nothing"))
    return Page(title=_HOSTILE, about=about, blocks=blocks)  # type: ignore[arg-type]


def test_numbers_are_written_by_their_unit() -> None:
    values = [(0.125, SHARE), (1234, ""), (1234.5, "ms"), (0.01234, "ms"), (None, ""), ("a", "")]
    texts = [number_text(value, unit) for value, unit in values]
    assert ["12.5%", "1,234", "1,234", "0.0123", "-", "a"] == texts


def test_a_value_says_its_unit_once() -> None:
    metric = METRICS["request_throughput_rps"]
    value = Value.of(metric.name, {metric.name: 2.5}, low=2.0, high=3.0)
    assert ("2.5", "2 to 3") == (value.text, value.interval)
    assert "7 ms" == Value(label="TTFT", value=7, unit="ms").text


def test_data_of_blocks_are_plain_and_finite() -> None:
    data = to_json(_page(Section("A", [_PLOT.scatter(), Text("b", "alert")])))
    kept = json.loads(json.dumps(data, allow_nan=False))
    (section,) = kept["blocks"]
    chart, text = section["blocks"]
    assert ("page", "section", "chart", "text") == tuple(
        block["kind"] for block in (kept, section, chart, text)
    )
    assert [["low", 1.5, 0.25], [_HOSTILE, 2, None]] == chart["table"]["rows"]
    assert {"1,1": "alert"} == chart["table"]["tones"]
    assert ["load", "goodput_rps", "mfu_ratio"] == [
        column["name"] for column in chart["table"]["columns"]
    ]


def test_a_page_closes_its_tags_and_shows_hostile_names_as_text() -> None:
    figures = Figures([Value(label=_HOSTILE, value=_HOSTILE, note=_HOSTILE)])
    parts = [_PLOT.lines(), _TABLE, figures, Text(_HOSTILE), Text(_HOSTILE, "code")]
    page = render(_page(Section(_HOSTILE, parts, open=False)))
    structure = parse_page(page)
    assert ([], []) == (structure.mismatches, structure.open_tags)
    assert "<script>alert" not in page
    # The data of a chart, Vega and our own: nothing that a name could have opened.
    assert 3 == len(re.findall("<script", page.replace(asset("vega.js"), "")))
    assert _HOSTILE in structure.text


def test_a_page_names_the_only_scripts_that_may_run() -> None:
    page = render(_page(_PLOT.scatter()))
    policy = re.search(r'Security-Policy" content="([^"]*)"', page)
    assert policy
    digests = [
        b64encode(sha256(asset(name).encode()).digest()).decode() for name in ("vega.js", "page.js")
    ]
    allowed = " ".join(f"&#39;sha256-{digest}&#39;" for digest in digests)
    assert policy[1].endswith(f"script-src {allowed}")
    assert policy[1].startswith("default-src &#39;none&#39;")


def test_a_page_without_charts_carries_no_library() -> None:
    assert len(asset("vega.js")) > len(render(_page(_TABLE)))


def test_headings_are_in_order_below_one_main() -> None:
    inner = Section("Inner", [Text("x")])
    blocks = [Section("Outer", [inner, _PLOT.scatter()]), Section("Next", [])]
    page = render(_page(*blocks)).replace(asset("vega.js"), "")
    levels = [int(level) for level in re.findall(r"<h(\d)>", page)]
    assert [1, 2, 3, 3, 2] == levels
    assert 1 == page.count("<main>")


def test_a_long_table_has_its_first_rows_and_all_as_data() -> None:
    rows = [(f"row {place}", place) for place in range(MOST_ROWS + 1)]
    table = Table(columns=[Column.words("name"), Column(title="place")], rows=rows)
    written = render_blocks([table])
    assert MOST_ROWS == written.count('<th scope="row"')
    data = re.search(r'<script type="application/json">(.*?)</script>', written)
    assert data
    assert [list(row) for row in rows] == json.loads(data[1])["rows"]


def test_colours_are_given_by_name_and_others_found() -> None:
    plot = Plot(
        title="", table=_TABLE, x="goodput_rps", y="mfu_ratio", by="load", colors={"low": GREEN}
    )
    scale = plot.scatter().spec["layer"][0]["encoding"]["color"]["scale"]
    assert {"domain": ["low", _HOSTILE], "range": [GREEN, ORANGE]} == scale


def test_an_axis_is_logarithmic_where_its_values_span_much() -> None:
    table = Table(columns=[Column(title="a"), Column(title="b")], rows=[(1, 1), (2, 41)])
    encoding = Plot(title="", table=table, x="a", y="b").lines().spec["layer"][0]["encoding"]
    assert ("linear", "log") == tuple(encoding[axis]["scale"]["type"] for axis in ("x", "y"))
