"""What was posted of something measured: its file, and what it was measured on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from foretoken.app.web.question import model_text, stored
from foretoken.app.web.visit import Upload
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.load import load_model
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario

# The field with the file, what requests a calibration, and the field it is kept under.
MEASURED, CALIBRATE, CORRECTION = "measured", "calibrate", "correction"
S = TypeVar("S", ServingScenario, TrainingScenario)


@contextmanager
def stored_measured(upload: Upload) -> Iterator[Path]:
    """Yield where a file lies for the moment; what cannot be is said of the file as it was sent.

    Raises:
        InvalidRequestError: as what is done with it.

    """
    with stored(upload) as path:
        try:
            yield path
        except InvalidRequestError as err:
            said = err.message.removeprefix(f"--{MEASURED}: ").replace(str(path), upload.name)
            raise InvalidRequestError.of_field(MEASURED, said) from err


def read_form(
    scenario: type[S], name: str, given: Mapping[str, str], keys: Mapping[str, type[int | str]]
) -> S:
    """Return the scenario of a form, whose fields are the last words of `keys`.

    Raises:
        InvalidRequestError: a field that cannot be; it is named as in the form.

    """
    content: dict[str, Any] = {"name": name}
    for path, kind in keys.items():
        field = path.rpartition(".")[2]
        text = given.get(field, "").strip()
        if text and kind is int and not text.isdecimal():
            raise InvalidRequestError.of_field(field, f"{text!r} is not a whole number")
        if text:
            schema.set_key(content, path, kind(text))
    return schema.decode(scenario, {**content, "model": load_model(model_text(given))})
