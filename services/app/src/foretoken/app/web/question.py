"""The request of a search that a form is filled in for, prices and measured traffic with it.

Nothing in a form names a file of this machine: models are presets or texts, traces are sent.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from foretoken.app.cli import search_serving, search_training
from foretoken.app.web.question_form import QuestionForm
from foretoken.app.web.visit import Upload
from foretoken.domain.errors import ForetokenError, InvalidRequestError, find_near
from foretoken.domain.hardware.price import find_price_list
from foretoken.domain.models.architecture import ModelArchitecture, all_models
from foretoken.domain.models.description import describe_model
from foretoken.domain.requests.search import ServingSearchRequest
from foretoken.domain.requests.training_search import TrainingSearchRequest
from foretoken.domain.text_file import parse_json_texts
from foretoken.simulator.report.question import sentence

CONFIG, TRACE, SPREAD, PRICES = "config", "trace", "spread", "prices"
CORRECTION: Final = "correction"
# What the files of the folder hold that the configuration is of.
HELD: Final = "checkpoint-bytes"
# Fields of the form that are no options of the command.
_OWN_NAMES: Final = frozenset({"model", CONFIG, TRACE, SPREAD, PRICES, CORRECTION, HELD})
_OWN_FIELDS: Final = frozenset({"model", "change", "tokens", "dataset", "price_list", "space"})
SERVING = QuestionForm(
    search_serving.QuestionOptions,
    search_serving.TargetOptions,
    ServingSearchRequest,
    without=_OWN_FIELDS,
)
TRAINING = QuestionForm(
    search_training.QuestionOptions,
    search_training.SpaceOptions,
    TrainingSearchRequest,
    without=_OWN_FIELDS | {"spot"},
)
# What a form can be corrected for, though no field is named.
_FORM_REASONS: Final = {"UNKNOWN_MODEL", "UNKNOWN_DEVICE", "UNKNOWN_PLUGIN", "SEARCH_TOO_LARGE"}
# File systems take 255 bytes.
_LONGEST_NAME: Final = 100
# A deviation of twenty times the mean would be no length of any traffic.
_WIDEST: Final = 20.0


def read_serving_request(
    given: Mapping[str, str], uploads: Mapping[str, Upload]
) -> ServingSearchRequest:
    """Return the search of a form; a trace that was sent stands for the lengths.

    Raises:
        InvalidRequestError: a field that cannot be; it is named as in the form.
        UnknownModelError, UnknownDeviceError: no such name.

    """
    answers = SERVING.answers(ServingSearchRequest, given)
    said = SERVING.answers(search_serving.QuestionOptions, given).read()
    said["model"] = model_text(given)
    targets = search_serving.TargetOptions(
        **SERVING.answers(search_serving.TargetOptions, given).read()
    )
    trace = uploads.get(TRACE)
    correction = given.get(CORRECTION, "").strip()
    changes: tuple[str, ...] = ()
    if correction:
        changes = (f"correction={json.dumps(correction)}",)
    if trace is None or not trace.name:
        changes += _spread_lengths(given, said)
        return _build_serving(
            {"model": model_text(given), **said}, changes, targets, answers, given
        )
    if not trace.content:
        raise InvalidRequestError.of_field(TRACE, f"{trace.name} is empty")
    said = {name: value for name, value in said.items() if name not in ("isl", "osl")}
    with stored(trace) as path:
        changes += ("workload.arrival=trace", f"workload.trace_path={path}")
        try:
            request = _build_serving(said, changes, targets, answers, given)
        except InvalidRequestError as err:
            if not any(one.field.endswith("trace_path") for one in err.violations):
                raise
            message = err.message.replace(str(path), trace.name)
            raise InvalidRequestError.of_field(TRACE, message) from err
    workload = replace(request.scenario.workload, trace_path="")
    return replace(request, scenario=replace(request.scenario, workload=workload))


def _build_serving(
    said: Mapping[str, Any],
    changes: tuple[str, ...],
    targets: search_serving.TargetOptions,
    answers: Any,
    given: Mapping[str, str],
) -> ServingSearchRequest:
    question = search_serving.QuestionOptions(**said, change=changes)
    request = search_serving.build_request(None, question, targets, answers)
    space = request.space
    devices = space.devices or (request.scenario.device,)
    listed = _listed_prices(given, devices, space.usd_per_hour)
    return replace(request, space=replace(space, usd_per_hour=listed))


def _spread_lengths(given: Mapping[str, str], said: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the changes that make lengths differ from request to request."""
    text = given.get(SPREAD, "").strip()
    if not text:
        return ()
    try:
        spread = float(text)
    except ValueError:
        raise InvalidRequestError.of_field(SPREAD, f"{text!r} is not a number") from None
    if not 0 <= spread <= _WIDEST:
        raise InvalidRequestError.of_field(SPREAD, f"must be from 0 to {_WIDEST:g}")
    if not spread:
        return ()
    return tuple(
        f"workload.{section}={{kind: lognormal, mean: {said[name]}, spread: {spread}}}"
        for section, name in (("prefill", "isl"), ("decode", "osl"))
        if said.get(name)
    )


def read_training_request(
    given: Mapping[str, str], _uploads: Mapping[str, Upload]
) -> TrainingSearchRequest:
    """Return the training search of a form; see `read_serving_request`."""
    question = search_training.QuestionOptions(
        model=model_text(given), **TRAINING.answers(search_training.QuestionOptions, given).read()
    )
    space = search_training.SpaceOptions(
        **TRAINING.answers(search_training.SpaceOptions, given).read()
    )
    answers = TRAINING.answers(TrainingSearchRequest, given)
    if name := given.get(PRICES, "").strip():
        find_price_list(name)
        space = replace(space, price_list=name)
    return search_training.build_training_request(None, question, space, answers)


def _listed_prices(
    given: Mapping[str, str], devices: tuple[str, ...], known: Mapping[str, float]
) -> Mapping[str, float]:
    """Return USD an hour of the devices: as they were given, else of the list that is named."""
    name = given.get(PRICES, "").strip()
    if not name:
        return known
    prices = find_price_list(name)
    try:
        listed = {
            device: prices.find(device, is_spot=False).pick(is_spot=False)
            for device in devices
            if device not in known
        }
    except InvalidRequestError as err:
        said = err.message.partition(": give")[0].removeprefix("prices: ")
        raise InvalidRequestError.of_field(PRICES, said) from err
    return {**listed, **known}


def model_text(given: Mapping[str, str]) -> str:
    """Return the preset's name, or the text of a `config.json`; no file of this machine."""
    text = given.get(CONFIG, "").strip()
    if text:
        if not all(
            isinstance(one, dict)
            for one in parse_json_texts(text, CONFIG, "the text of a config.json")
        ):
            raise InvalidRequestError.of_field(CONFIG, "is the text of a config.json: {...}")
        return text
    name = given.get("model", "").strip()
    if not name:
        raise InvalidRequestError.of_field("--model", "name a model, or paste its config.json")
    if name not in all_models():
        near = ", ".join(find_near(name, all_models()))
        raise InvalidRequestError.of_field("--model", f"no preset {name!r}; near are {near}")
    return name


def find_remarks(given: Mapping[str, str], model: ModelArchitecture) -> dict[str, str]:
    """Return what to know of a form that can be asked, by its field."""
    held = given.get(HELD, "").strip()
    if not given.get(CONFIG, "").strip() or not (held.isascii() and held.isdigit()):
        return {}
    difference = describe_model(model, int(held)).difference
    return {HELD: sentence(difference)} if difference else {}


def find_problems(error: ForetokenError, form: QuestionForm | None = None) -> dict[str, str]:
    """Return what is wrong by the field of the form; under "" what no field is to blame for.

    Raises:
        ForetokenError: the error, where no other form would help.

    """
    if not isinstance(error, InvalidRequestError):
        if error.reason not in _FORM_REASONS:
            raise error
        return {"": error.message}
    names = form.names if form else {}
    found: dict[str, str] = {}
    for violation in error.violations:
        for one in violation.field.split(", "):
            name = one.removeprefix("--").rpartition(".")[2]
            found[names.get(name, name)] = violation.description
    # The message names fields as the command line does, which those of the form need not be.
    is_shown = form is not None and found.keys() <= {*names.values(), *_OWN_NAMES}
    found[""] = "; ".join(dict.fromkeys(found.values())) if is_shown else error.message
    return found


@contextmanager
def stored(upload: Upload) -> Iterator[Path]:
    """Yield where a file that was sent lies for the moment."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / file_name_of(upload.name)
        path.write_bytes(upload.content)
        yield path


def file_name_of(given: str) -> str:
    """Return a file's name as it can be here, where whoever sends it says what it is."""
    kept = re.sub(r"[^\w.-]+", "_", given.replace("\\", "/").rpartition("/")[2], flags=re.ASCII)
    return kept.lstrip(".")[-_LONGEST_NAME:] or "run"
