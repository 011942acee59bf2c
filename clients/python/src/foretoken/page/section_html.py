"""Write sections as one HTML page with pictures: what has no blocks yet."""

import re
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from foretoken.page.section import Cell, Section

# Commands and names of files are between backticks, as on a terminal.
_CODE = re.compile(r"`([^`]+)`")


def render_sections(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """Return the page; all text but the pictures is escaped."""
    environment = Environment(
        loader=PackageLoader("foretoken.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The figures are our own SVG.
    environment.filters["as_svg"] = Markup
    environment.filters["with_code"] = _with_code
    template = environment.get_template("page.html.j2")
    return template.render(title=title, subtitle=subtitle, sections=sections)


def _with_code(text: str | Cell) -> Markup:
    """Return the escaped text, what is between backticks as code."""
    # Escaped before the tags are put in.
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(str(text)))))  # noqa: S704
