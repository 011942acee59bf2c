"""Ask: a question as a form, answered in closed form at once, and by simulation after."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from urllib.parse import urlencode

from foretoken.app.web.question import (
    SERVING,
    TRAINING,
    find_problems,
    find_remarks,
    read_serving_request,
    read_training_request,
)
from foretoken.app.web.question_form import QuestionForm
from foretoken.app.web.views.answer import PATIENCE_S, wait_a_moment
from foretoken.app.web.visit import Redirect, Sent, Shown, Upload, Visit, send_json
from foretoken.domain.errors import ForetokenError
from foretoken.domain.frameworks.engine import DEFAULT_PROFILE, all_engines
from foretoken.domain.frameworks.trainer import DEFAULT_TRAINER, all_trainers
from foretoken.domain.hardware.device import all_devices
from foretoken.domain.hardware.price import all_price_lists
from foretoken.domain.job import Job, JobState
from foretoken.domain.models.architecture import all_models
from foretoken.domain.ports import SimulatorPort
from foretoken.domain.requests.question import OBJECTIVE_WORDS
from foretoken.domain.requests.search import OBJECTIVES, ServingSearchRequest
from foretoken.domain.requests.training_search import TrainingSearchRequest

Request = TypeVar("Request", ServingSearchRequest, TrainingSearchRequest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question(Generic[Request]):
    """A question that is asked by a form: of a deployment, or of a training run.

    `leading` are the fields that `template` writes itself, in words of its own; the others are made
    of the options. `answers` is where its answers are. `read` makes its request of what was filled
    in, `start` begins its search.
    """

    title: str
    path: str
    template: str
    answers: str
    form: QuestionForm
    leading: Sequence[str]
    example: Mapping[str, str]
    read: Callable[[Mapping[str, str], Mapping[str, Upload]], Request]
    start: Callable[[SimulatorPort, Request], Job]

    def show(self, visit: Visit) -> Shown:
        """Show the form; an address may fill it in."""
        given = visit.asked or self.example
        with suppress(ForetokenError):
            self._warm_up(visit, self.read(given, {}))
        return self._show(given, {}, is_whole=bool(visit.asked))

    def ask(self, visit: Visit) -> Shown | Redirect:
        """Start the closed form, and the simulation of its finalists; go to the answer."""
        try:
            request = self.read(visit.posted, visit.uploads)
            visit.warm_ups.settle(request, PATIENCE_S)
            quick = self.start(visit.simulator, replace(request, num_finalists=0))
            target = f"{self.answers}/{quick.job_id}"
            # The closed form has the machine for itself first.
            ended = wait_a_moment(visit, quick.job_id)
            if ended is not None and ended.state is JobState.FAILED:
                problems = {"": ended.error_message}
                return self._show(visit.posted, problems, is_whole=True, status=400)
            if request.num_finalists:
                whole = self.start(visit.simulator, request)
                target += "?" + urlencode({"simulation": whole.job_id})
        except ForetokenError as err:
            problems = find_problems(err, self.form)
            return self._show(visit.posted, problems, is_whole=True, status=400)
        return Redirect(target)

    def check(self, visit: Visit) -> Sent:
        """Send what is wrong with a form as it stands, by its fields; no job is started."""
        try:
            request = self.read(visit.posted, visit.uploads)
            self._warm_up(visit, request)
        except ForetokenError as err:
            return send_json(find_problems(err, self.form))
        return send_json(find_remarks(visit.posted, request.scenario.model))

    def _warm_up(self, visit: Visit, request: Request) -> None:
        if visit.may("plan"):
            visit.warm_ups.begin(visit.offered, request)

    def _show(
        self,
        given: Mapping[str, str],
        problems: Mapping[str, str],
        *,
        is_whole: bool,
        status: int = 200,
    ) -> Shown:
        groups = self.form.fields(given if is_whole else None, problems, self.leading)
        content = {
            **known_names(),
            "title": self.title,
            "check_path": f"{self.path.rstrip('/')}/check",
            "given": given,
            "problems": problems,
            "groups": groups,
        }
        return Shown(template=self.template, content=content, status=status)


SERVING_QUESTION = Question(
    title="Ask",
    path="/",
    template="ask_serving.html",
    answers="/answers",
    form=SERVING,
    leading=("model", "devices", "gpus", "isl", "osl", "ttft", "tpot", "profile", "objective"),
    example={
        "model": "llama-3.1-8b",
        "devices": "h100_sxm",
        "gpus": "8",
        "isl": "1024",
        "osl": "256",
        "ttft": "2s",
        "tpot": "30ms",
    },
    read=read_serving_request,
    start=lambda simulator, request: simulator.create_serving_search(request),
)
TRAINING_QUESTION = Question(
    title="Train",
    path="/train",
    template="ask_training.html",
    answers="/strategies",
    form=TRAINING,
    leading=("model", "devices", "gpus", "global-batch-tokens", "sequence-length", "trainer"),
    example={
        "model": "llama-3.1-8b",
        "devices": "h100_sxm",
        "gpus": "64",
        "global-batch-tokens": "4194304",
        "sequence-length": "4096",
    },
    read=read_training_request,
    start=lambda simulator, request: simulator.create_training_search(request),
)


def known_names() -> dict[str, Any]:
    """Return what forms propose, by the name that templates have for it."""
    return {
        "models": list(all_models()),
        "devices": {device.name: device.description for device in all_devices().values()},
        "engines": list(all_engines()),
        "usual_engine": DEFAULT_PROFILE,
        "trainers": list(all_trainers()),
        "usual_trainer": DEFAULT_TRAINER,
        "price_lists": {name: prices.provider for name, prices in all_price_lists().items()},
        "objectives": {name: OBJECTIVE_WORDS[name] for name in OBJECTIVES},
    }
