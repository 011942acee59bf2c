"""Ask: a question as a form, answered in closed form at once, and by simulation after."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from foretoken.app.cli import search_serving, search_training
from foretoken.app.web.question_form import QuestionForm
from foretoken.app.web.views.answer import wait_a_moment
from foretoken.app.web.visit import Redirect, Shown, Visit
from foretoken.domain.errors import ForetokenError, InvalidRequestError, find_near
from foretoken.domain.frameworks.engine import all_engines
from foretoken.domain.frameworks.trainer import all_trainers
from foretoken.domain.hardware.device import all_devices
from foretoken.domain.models.architecture import all_models
from foretoken.domain.requests.question import OBJECTIVE_WORDS
from foretoken.domain.requests.search import OBJECTIVES, ServingSearchRequest
from foretoken.domain.requests.training_search import TrainingSearchRequest

# Fields that stand first, in words of their own; the others are made of the options.
_SERVING_FIRST = ("model", "devices", "gpus", "isl", "osl", "ttft", "tpot", "profile", "objective")
_TRAINING_FIRST = ("model", "devices", "gpus", "global-batch-tokens", "sequence-length", "trainer")
_EXAMPLE = {
    "model": "llama-3.1-8b",
    "devices": "h100_sxm",
    "gpus": "8",
    "isl": "1024",
    "osl": "256",
    "ttft": "2s",
    "tpot": "30ms",
}
_TRAINING_EXAMPLE = {
    "model": "llama-3.1-8b",
    "devices": "h100_sxm",
    "gpus": "64",
    "global-batch-tokens": "4194304",
    "sequence-length": "4096",
}
_CONFIG = "config"
_OWN_FIELDS = frozenset({"model", "change", "tokens", "dataset"})
_SERVING = QuestionForm(
    search_serving.QuestionOptions,
    search_serving.TargetOptions,
    ServingSearchRequest,
    without=_OWN_FIELDS,
)
_TRAINING = QuestionForm(
    search_training.QuestionOptions, TrainingSearchRequest, without=_OWN_FIELDS
)


def show_serving(visit: Visit) -> Shown:
    """Show the form of a serving question; an address may fill it in."""
    return _show_serving(visit.asked or _EXAMPLE, {}, is_whole=bool(visit.asked))


def ask_serving(visit: Visit) -> Shown | Redirect:
    """Start the closed form, and the simulation of its finalists; go to the answer."""
    try:
        request = read_serving_request(visit.posted)
        quick = visit.simulator.create_serving_search(replace(request, num_finalists=0))
        target = f"/answers/{quick.job_id}"
        # The closed form has the machine for itself first.
        wait_a_moment(visit, quick.job_id)
        if request.num_finalists:
            whole = visit.simulator.create_serving_search(request)
            target += "?" + urlencode({"simulation": whole.job_id})
    except ForetokenError as err:
        return _show_serving(visit.posted, find_problems(err), is_whole=True, status=400)
    return Redirect(target)


# What a form can be corrected for, though no field is named.
_FORM_REASONS = {"UNKNOWN_MODEL", "UNKNOWN_DEVICE", "UNKNOWN_PLUGIN", "SEARCH_TOO_LARGE"}


def read_serving_request(given: Mapping[str, str]) -> ServingSearchRequest:
    """Return the search of a form.

    Raises:
        InvalidRequestError: a field that cannot be; it is named as in the form.
        UnknownModelError, UnknownDeviceError: no such name.

    """
    question = search_serving.QuestionOptions(
        model=model_text(given), **_SERVING.answers(search_serving.QuestionOptions, given).read()
    )
    targets = search_serving.TargetOptions(
        **_SERVING.answers(search_serving.TargetOptions, given).read()
    )
    answers = _SERVING.answers(ServingSearchRequest, given)
    return search_serving.build_request(None, question, targets, answers)


def show_training(visit: Visit) -> Shown:
    """Show the form of a training question."""
    return _show_training(visit.asked or _TRAINING_EXAMPLE, {}, is_whole=bool(visit.asked))


def ask_training(visit: Visit) -> Shown | Redirect:
    """Start a search for the best strategy; go to its job."""
    try:
        request = read_training_request(visit.posted)
        job = visit.simulator.create_training_search(request)
    except ForetokenError as err:
        return _show_training(visit.posted, find_problems(err), is_whole=True, status=400)
    return Redirect(f"/jobs/simulator/{job.job_id}")


def read_training_request(given: Mapping[str, str]) -> TrainingSearchRequest:
    """Return the training search of a form; see `read_serving_request`."""
    question = search_training.QuestionOptions(
        model=model_text(given), **_TRAINING.answers(search_training.QuestionOptions, given).read()
    )
    answers = _TRAINING.answers(TrainingSearchRequest, given)
    return search_training.build_training_request(
        None, question, search_training.SpaceOptions(), answers
    )


def model_text(given: Mapping[str, str]) -> str:
    """Return the preset's name, or the text of a `config.json`; no file of this machine."""
    text = given.get(_CONFIG, "").strip()
    if text:
        if not text.startswith("{"):
            raise InvalidRequestError.of_field(_CONFIG, "is the text of a config.json: {...}")
        return text
    name = given.get("model", "").strip()
    if not name:
        raise InvalidRequestError.of_field("--model", "name a model, or paste its config.json")
    if name not in all_models():
        near = ", ".join(find_near(name, all_models()))
        raise InvalidRequestError.of_field("--model", f"no preset {name!r}; near are {near}")
    return name


def _show_serving(
    given: Mapping[str, str], problems: Mapping[str, str], *, is_whole: bool, status: int = 200
) -> Shown:
    groups = _SERVING.fields(given if is_whole else None, problems, _SERVING_FIRST)
    content = {**known_names(), "given": given, "problems": problems, "groups": groups}
    return Shown(template="ask_serving.html", content=content, status=status)


def _show_training(
    given: Mapping[str, str], problems: Mapping[str, str], *, is_whole: bool, status: int = 200
) -> Shown:
    groups = _TRAINING.fields(given if is_whole else None, problems, _TRAINING_FIRST)
    content = {**known_names(), "given": given, "problems": problems, "groups": groups}
    return Shown(template="ask_training.html", content=content, status=status)


def known_names() -> dict[str, Any]:
    """Return what forms propose, by the name that templates have for it."""
    return {
        "models": list(all_models()),
        "devices": {device.name: device.description for device in all_devices().values()},
        "engines": list(all_engines()),
        "trainers": list(all_trainers()),
        "objectives": {name: OBJECTIVE_WORDS[name] for name in OBJECTIVES},
    }


def find_problems(error: ForetokenError) -> dict[str, str]:
    """Return what is wrong by the field of the form; under "" what no field is to blame for.

    Raises:
        ForetokenError: the error, where no other form would help.

    """
    if not isinstance(error, InvalidRequestError):
        if error.reason not in _FORM_REASONS:
            raise error
        return {"": error.message}
    found: dict[str, str] = {}
    for violation in error.violations:
        name = violation.field.removeprefix("--").rpartition(".")[2]
        found[name] = violation.description
    found[""] = error.message
    return found
