"""Compare: two to six results of one kind, differences first."""

from collections.abc import Sequence
from typing import Final

from foretoken.app.web.views.results import read, send_page
from foretoken.app.web.visit import Sent, Shown, Visit
from foretoken.client.results import list_results
from foretoken.domain.errors import InvalidRequestError
from foretoken.simulator.report import page
from foretoken.simulator.report.compare_runs import ComparedRun, compare_figures, name_runs

_LEAST, _MOST = 2, 6
_OFFERED: Final = 100


def show(visit: Visit) -> Shown:
    """Show the figures of the results that are named, or what there is to be named."""
    names = visit.query.get("run", [])
    if len(names) < _LEAST:
        kept = list_results(visit.catalog)[:_OFFERED]
        return Shown(template="compare_choose.html", content={"results": kept, "chosen": names})
    runs = _read(visit, names)
    figures = compare_figures([run.report for run in runs])
    content = {
        "runs": runs,
        "figures": sorted(figures, key=lambda figure: len(set(figure.texts())) == 1),
        "query": "&".join(f"run={run.result.job_id}" for run in runs),
    }
    return Shown(template="compare.html", content=content)


def send_report(visit: Visit) -> Sent:
    """Send the page that draws the results over each other."""
    runs = _read(visit, visit.query.get("run", []))
    title = "Comparison: " + " against ".join(run.words for run in runs)
    return send_page(page.render_page(title, page.compare_sections(runs)))


def _read(visit: Visit, names: Sequence[str]) -> Sequence[ComparedRun]:
    if not _LEAST <= len(names) <= _MOST:
        raise InvalidRequestError.of_field("run", f"name {_LEAST} to {_MOST} results")
    return name_runs([read(visit, name) for name in names])
