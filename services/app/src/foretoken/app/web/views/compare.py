"""Compare: two to six results of one kind, differences first."""

from collections.abc import Sequence

from foretoken.app.web.views import results
from foretoken.app.web.views.results import read, send_page
from foretoken.app.web.visit import Sent, Shown, Visit
from foretoken.domain.errors import InvalidRequestError
from foretoken.simulator.comparison import ComparedRun, name_runs
from foretoken.simulator.report import page

_LEAST, _MOST = 2, 6


def show(visit: Visit) -> Shown:
    """Show the results that are named over each other, or what there is to be named."""
    names = visit.query.get("run", [])
    if len(names) < _LEAST:
        return results.show(visit, "Compare results")
    runs = _read(visit, names)
    query = "&".join(f"run={run.result.job_id}" for run in runs)
    return Shown(template="compare.html", content={"runs": runs, "query": query})


def send_report(visit: Visit) -> Sent:
    """Send the page that draws the results over each other."""
    runs = _read(visit, visit.query.get("run", []))
    title = "Comparison: " + " against ".join(run.words for run in runs)
    return send_page(page.render_page(title, page.compare_sections(runs)))


def _read(visit: Visit, names: Sequence[str]) -> Sequence[ComparedRun]:
    if not _LEAST <= len(names) <= _MOST:
        raise InvalidRequestError.of_field("run", f"name {_LEAST} to {_MOST} results")
    return name_runs([read(visit, name) for name in names])
