"""From the answer of a search to files that start it: `--generate`."""

import json
from pathlib import Path

from foretoken.app.cli.state import note
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.domain.requests.search import Finalist, ServingSearchReport
from foretoken.simulator.launch.write import LaunchOptions, write_deployment


def launch_best(report: ServingSearchReport, folder: Path, options: LaunchOptions) -> None:
    """Write the files of the best deployment that met the targets when it was simulated.

    Raises:
        InvalidRequestError: none did, or no server can be started that way.

    """
    chosen = find_launched(report)
    scenario = schema.decode(ServingScenario, json.loads(chosen.scenario_json))
    paths = write_deployment(scenario, folder, options)
    if chosen.name != report.best:
        note(f"{report.best} misses the targets when simulated")
    note(f"{chosen.name} written to {folder}: {', '.join(path.name for path in paths)}")


def find_launched(report: ServingSearchReport) -> Finalist:
    """Return the first finalist that meets the targets.

    Raises:
        InvalidRequestError: there is none.

    """
    for finalist in report.finalists:
        if finalist.is_met:
            return finalist
    reason = (
        "no finalist meets the targets: simulate more (--finalists), or ask for less"
        if report.finalists
        else "nothing was simulated that could be written: no deployment qualifies"
    )
    raise InvalidRequestError.of_field("--generate", reason)
