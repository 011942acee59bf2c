"""Ask: a question as a form, answered in closed form at once, and by simulation after."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from foretoken.app.web.question import (
    SERVING,
    TRAINING,
    find_problems,
    read_serving_request,
    read_training_request,
)
from foretoken.app.web.views.answer import wait_a_moment
from foretoken.app.web.visit import Redirect, Sent, Shown, Visit, send_json
from foretoken.domain.errors import ForetokenError
from foretoken.domain.frameworks.engine import all_engines
from foretoken.domain.frameworks.trainer import all_trainers
from foretoken.domain.hardware.device import all_devices
from foretoken.domain.hardware.price import all_price_lists
from foretoken.domain.models.architecture import all_models
from foretoken.domain.requests.question import OBJECTIVE_WORDS
from foretoken.domain.requests.search import OBJECTIVES

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


def show_serving(visit: Visit) -> Shown:
    """Show the form of a serving question; an address may fill it in."""
    return _show_serving(visit.asked or _EXAMPLE, {}, is_whole=bool(visit.asked))


def ask_serving(visit: Visit) -> Shown | Redirect:
    """Start the closed form, and the simulation of its finalists; go to the answer."""
    try:
        request = read_serving_request(visit.posted, visit.uploads)
        quick = visit.simulator.create_serving_search(replace(request, num_finalists=0))
        target = f"/answers/{quick.job_id}"
        # The closed form has the machine for itself first.
        wait_a_moment(visit, quick.job_id)
        if request.num_finalists:
            whole = visit.simulator.create_serving_search(request)
            target += "?" + urlencode({"simulation": whole.job_id})
    except ForetokenError as err:
        problems = find_problems(err, SERVING)
        return _show_serving(visit.posted, problems, is_whole=True, status=400)
    return Redirect(target)


def check_serving(visit: Visit) -> Sent:
    """Send what is wrong with a form as it stands, by its fields; nothing is started."""
    try:
        read_serving_request(visit.posted, visit.uploads)
    except ForetokenError as err:
        return send_json(find_problems(err, SERVING))
    return send_json({})


def show_training(visit: Visit) -> Shown:
    """Show the form of a training question."""
    return _show_training(visit.asked or _TRAINING_EXAMPLE, {}, is_whole=bool(visit.asked))


def ask_training(visit: Visit) -> Shown | Redirect:
    """Start the closed form of a training search, and the simulation of its best; go to both."""
    try:
        request = read_training_request(visit.posted)
        quick = visit.simulator.create_training_search(replace(request, num_finalists=0))
        target = f"/strategies/{quick.job_id}"
        wait_a_moment(visit, quick.job_id)
        if request.num_finalists:
            whole = visit.simulator.create_training_search(request)
            target += "?" + urlencode({"simulation": whole.job_id})
    except ForetokenError as err:
        problems = find_problems(err, TRAINING)
        return _show_training(visit.posted, problems, is_whole=True, status=400)
    return Redirect(target)


def check_training(visit: Visit) -> Sent:
    """Send what is wrong with a form; see `check_serving`."""
    try:
        read_training_request(visit.posted)
    except ForetokenError as err:
        return send_json(find_problems(err, TRAINING))
    return send_json({})


def _show_serving(
    given: Mapping[str, str], problems: Mapping[str, str], *, is_whole: bool, status: int = 200
) -> Shown:
    groups = SERVING.fields(given if is_whole else None, problems, _SERVING_FIRST)
    content = {**known_names(), "given": given, "problems": problems, "groups": groups}
    return Shown(template="ask_serving.html", content=content, status=status)


def _show_training(
    given: Mapping[str, str], problems: Mapping[str, str], *, is_whole: bool, status: int = 200
) -> Shown:
    groups = TRAINING.fields(given if is_whole else None, problems, _TRAINING_FIRST)
    content = {**known_names(), "given": given, "problems": problems, "groups": groups}
    return Shown(template="ask_training.html", content=content, status=status)


def known_names() -> dict[str, Any]:
    """Return what forms propose, by the name that templates have for it."""
    return {
        "models": list(all_models()),
        "devices": {device.name: device.description for device in all_devices().values()},
        "engines": list(all_engines()),
        "trainers": list(all_trainers()),
        "price_lists": {name: prices.provider for name, prices in all_price_lists().items()},
        "objectives": {name: OBJECTIVE_WORDS[name] for name in OBJECTIVES},
    }
