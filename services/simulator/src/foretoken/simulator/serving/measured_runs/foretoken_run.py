"""What `foretoken collect` recorded."""

from collections.abc import Mapping

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.serving_run import RUN_FORMAT, ServingRun, decode_run
from foretoken.simulator.validation.measured_run import MeasuredRunFormat, RunFile


def _recognises(file: RunFile) -> bool:
    return isinstance(file.json, Mapping) and file.json.get("format") == RUN_FORMAT


def _read(file: RunFile) -> ServingRun:
    if not isinstance(file.json, Mapping):
        file.refuse(file.broken_json or "expected a JSON object")
    try:
        return decode_run(file.json)
    except InvalidRequestError as err:
        file.refuse(err.message)


MEASURED_RUN = MeasuredRunFormat(
    title="a run that `foretoken collect` recorded",
    file_names=("run.json",),
    recognises=_recognises,
    read=_read,
)
