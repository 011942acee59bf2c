"""Write sections as one HTML page: no scripts, nothing fetched, light and dark."""

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from foretoken.page.section import Section


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
    template = environment.get_template("page.html.j2")
    return template.render(title=title, subtitle=subtitle, sections=sections)
