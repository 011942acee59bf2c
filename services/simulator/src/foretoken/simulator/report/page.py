"""One self-contained HTML page: no scripts, nothing fetched, light and dark."""

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from foretoken.simulator.report.section import Section
from foretoken.simulator.report.serving_sections import serving_sections
from foretoken.simulator.report.training_sections import training_sections

__all__ = ["render_page", "serving_sections", "training_sections"]


def render_page(title: str, sections: Sequence[Section]) -> str:
    """Return the page as HTML."""
    environment = Environment(
        loader=PackageLoader("foretoken.simulator.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The figures are our own SVG; all other text is escaped.
    environment.filters["as_svg"] = Markup
    return environment.get_template("page.html.j2").render(title=title, sections=sections)
