"""Write pages as HTML: one file that fetches nothing, or a part of a live page.

A page reads without scripts: every chart has its table. `page.js` draws the charts with Vega and
lets tables sort and filter; `asset` has both, for who serves them.
"""

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files

from markupsafe import Markup, escape

from foretoken.page.block import (
    Block,
    Cell,
    Chart,
    Column,
    Figures,
    Page,
    Scalar,
    Section,
    Table,
    Text,
    to_json,
)
from foretoken.page.section import Section as UsualSection

# Rows of a longer table are data that the page shows by and by.
MOST_ROWS = 200
# Shorter ones are seen at a glance.
_LEAST_FILTERED = 12
# Commands and names of files are between backticks, as on a terminal.
_CODE = re.compile(r"`([^`]+)`")
_DEEPEST_HEADING = 6
# Of the scripts on a page only ours run, and nothing is loaded.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {}"


@cache
def asset(name: str) -> str:
    """Return the text of `page.css`, `page.js` or `vega.js`: Vega, Vega-Lite and Vega-Embed.

    `vega.js` is kept compressed; `asset_gzip` has it as it is served.
    """
    if name == "vega.js":
        return gzip.decompress(asset_gzip(name)).decode()
    return (files("foretoken.page") / "static" / name).read_text(encoding="utf-8")


@cache
def asset_gzip(name: str) -> bytes:
    """Return an asset as `Content-Encoding: gzip` sends it; see `asset`."""
    if name == "vega.js":
        return (files("foretoken.page") / "static" / "vega.js.gz").read_bytes()
    return gzip.compress(asset(name).encode(), mtime=0)


def render(page: Page) -> str:
    """Return the page as one HTML file; all text is escaped."""
    names = ["vega.js", "page.js"] if _has_chart(page.blocks) else ["page.js"]
    scripts = [asset(name) for name in names]
    hashes = (b64encode(sha256(script.encode()).digest()).decode() for script in scripts)
    policy = _POLICY.format(" ".join(f"'sha256-{digest}'" for digest in hashes))
    head = Markup(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="{}">\n'
        "<title>{} · Foretoken</title>\n<style>\n{}</style>\n</head>\n<body>\n"
    ).format(policy, page.title, _own(asset("page.css")))
    tail = _join(Markup("<script>{}</script>\n").format(_own(script)) for script in scripts)
    return str(head + render_main(page) + tail + Markup("</body>\n</html>\n"))


def render_sections(title: str, subtitle: str, sections: Sequence[UsualSection]) -> str:
    """Return the usual sections as one HTML file, with what they are about at its top."""
    about = [line for section in sections for line in section.about]
    blocks = [section.as_block() for section in sections]
    return render(Page(title=title, subtitle=subtitle, about=about, blocks=blocks))


def render_main(page: Page) -> Markup:
    """Return the header and the `main` of a page, to be put where a live page has its own."""
    subtitle = Markup("<p>{}</p>\n").format(page.subtitle) if page.subtitle else Markup()
    lines = [_tag("dt", name) + _tag("dd", _with_code(text)) + "\n" for name, text in page.about]
    about = _tag("dl", "\n", *lines, class_="about") + "\n" if lines else Markup()
    return Markup("<header>\n<h1>{}</h1>\n{}{}</header>\n<main>\n{}</main>\n").format(
        page.title, subtitle, about, render_blocks(page.blocks)
    )


def render_blocks(blocks: Sequence[Block], level: int = 2) -> Markup:
    """Return blocks as HTML, with headings from a level on."""
    return _join(_block(block, level) for block in blocks)


def _block(block: Block, level: int) -> Markup:
    match block:
        case Section():
            parts = _heading(block.title, level), render_blocks(block.blocks, level + 1)
            folded = "<details>\n<summary>{}</summary>\n{}</details>\n"
            tags = "<section>\n{}{}</section>\n" if block.open else folded
            written = Markup(tags).format(*parts)  # noqa: S704
        case Figures():
            written = _figures(block)
        case Table():
            written = _table(block)
        case Chart():
            written = _chart(block, level)
        case Text(tone="code"):
            written = _tag("pre", block.text, tabindex="0") + "\n"
        case Text():
            tone = "paragraph-alert" if block.tone else ""
            written = _tag("p", _with_code(block.text), class_=tone) + "\n"
    return written


def _figures(figures: Figures) -> Markup:
    parts = []
    for value in figures.values:
        notes = [note for note in (value.interval, value.note) if note]
        said = [value.text, "; ".join(notes)] if notes else [value.text]
        words = _tag("dt", value.label), *(_tag("dd", text) for text in said)
        parts.append(_tag("div", *words) + "\n")
    return _tag("dl", "\n", *parts, class_="figures") + "\n"


def _chart(chart: Chart, level: int) -> Markup:
    title = _heading(chart.title, level) if chart.title else Markup()
    label = f"{chart.title}. {chart.caption}".strip(". ")
    plot = _tag("div", class_="plot", role="img", aria_label=label)
    text = _tag("figcaption", _with_code(chart.caption)) + "\n" if chart.caption else Markup()
    table = _tag("summary", "Table"), "\n", _table(chart.table, is_in_chart=True)
    parts = "\n", plot, "\n", text, _tag("details", *table), "\n", _data(chart)
    return title + _tag("figure", *parts, class_="chart") + "\n"


def _table(table: Table, *, is_in_chart: bool = False) -> Markup:
    is_long = len(table.rows) > MOST_ROWS
    headers = _join(_header(column) for column in table.columns)
    rows = _join(_row(table.columns, row) for row in table.rows[:MOST_ROWS])
    tools = (
        Markup(
            '<div class="tools" hidden><label>Filter <input type="search"></label> <span'
            ' class="count" role="status"></span> <button type="button" class="more"'
            " hidden>more</button></div>\n"
        )
        if len(table.rows) > _LEAST_FILTERED
        else Markup()
    )
    is_data = is_long and not is_in_chart
    return Markup(
        '<div class="table"{}>\n{}<div class="scroll" tabindex="0" role="group" aria-label="{}">\n'
        "<table><thead><tr>{}</tr></thead>\n<tbody>\n{}</tbody></table>\n</div>\n{}</div>\n"
    ).format(
        Markup(" data-long") if is_data else Markup(),
        tools,
        "table: " + ", ".join(column.title for column in table.columns),
        headers,
        rows,
        _data(table) if is_data else Markup(),
    )


def _header(column: Column) -> Markup:
    if not column.title:
        return Markup("<td></td>")
    kind = "text" if column.is_text else ""
    return _tag("th", column.title, scope="col", class_=kind, title=column.definition)


def _row(columns: Sequence[Column], row: Sequence[Scalar | Cell]) -> Markup:
    cells = []
    for place, (column, cell) in enumerate(zip(columns, row, strict=True)):
        value = cell.value if isinstance(cell, Cell) else cell
        names = [f"tone-{cell.tone}"] if isinstance(cell, Cell) else []
        names += ["text"] if column.is_text else []
        number = str(float(value)) if isinstance(value, int | float) else ""
        looks = {"scope": "" if place else "row", "class_": " ".join(names), "data_value": number}
        cells.append(_tag("td" if place else "th", _with_code(column.text(cell)), **looks))
    return _tag("tr", *cells) + "\n"


def _data(block: Block) -> Markup:
    """Return a block as data inside the page; what would end a script is written otherwise."""
    text = json.dumps(to_json(block), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup('<script type="application/json">{}</script>\n').format(_own(text))


def _heading(title: str, level: int) -> Markup:
    return _tag(f"h{min(level, _DEEPEST_HEADING)}", title) + "\n"


def _tag(name: str, *content: str, **attributes: str) -> Markup:
    """Return an element of escaped content; attributes that are empty are left out."""
    written = _join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, written, _join(content))


def _with_code(text: str) -> Markup:
    """Return the escaped text, what is between backticks as code."""
    # Escaped before the tags are put in.
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))  # noqa: S704


def _own(text: str) -> Markup:
    """Return a script, a style or data of ours, which are not escaped."""
    return Markup(text)  # noqa: S704


def _join(parts: Iterable[str]) -> Markup:
    return Markup().join(parts)


def _has_chart(blocks: Iterable[Block]) -> bool:
    return any(
        isinstance(block, Chart) or (isinstance(block, Section) and _has_chart(block.blocks))
        for block in blocks
    )
