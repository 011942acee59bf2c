"""What a search has to answer of its space, of equal devices or of a cluster of several kinds."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.training_search import (
    StrategySensitivity,
    TieCall,
    TrainingSearchRequest,
)
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.placement.closed_form import answer_placements
from foretoken.simulator.search.placement.request import check_placements
from foretoken.simulator.search.placement.sensitivity import find_placed_sensitivity
from foretoken.simulator.search.placement.stage_memory import StageBook
from foretoken.simulator.search.training.answers import objective_values
from foretoken.simulator.search.training.changes import BATCH_CHANGES, list_changes
from foretoken.simulator.search.training.closed_form import (
    ClosedForm,
    Setting,
    Tell,
    answer_in_closed_form,
)
from foretoken.simulator.search.training.outcome import describe
from foretoken.simulator.search.training.sensitivity import Sensitivities
from foretoken.simulator.search.training.survey import Survey
from foretoken.simulator.search.training.ties import find_tie_calls

# Hears how far the changed questions are, from 0 to 1, and in words.
TellChanged = Callable[[float, str], None]


class Question(Protocol):
    """A request, whose closed form, ties and changes are asked for in turn."""

    def answer(self, tell: Tell) -> ClosedForm:
        """Return every point counted and the best ranked; `tell` hears how far it is.

        Raises:
            InvalidRequestError: the request cannot be answered; the message says what to change.

        """

    def find_tie_calls(self, form: ClosedForm) -> tuple[TieCall, ...]:
        """Return what to measure to tell the first tie from the best."""

    def find_sensitivities(
        self, form: ClosedForm, tell: TellChanged
    ) -> tuple[StrategySensitivity, ...]:
        """Return what becomes of the best under every change that the request lists."""


def ask(request: TrainingSearchRequest, predictor: LatencySource) -> Question:
    """Return the question of a request.

    Raises:
        InvalidRequestError: it cannot be asked; the message says what to change.

    """
    if request.space.node_groups:
        check_placements(request)
        return MixedCluster(request, predictor)
    _check_prices(request)
    return EqualDevices(request, predictor)


class EqualDevices:
    """A space of strategies each of which has devices of one kind."""

    def __init__(self, request: TrainingSearchRequest, predictor: LatencySource) -> None:
        """Take a request; changed hardware is answered together with it."""
        self._predictor = predictor
        self._changes = Sensitivities(request, predictor) if request.has_sensitivity else None
        self._setting = (
            Setting(predictor=predictor) if self._changes is None else self._changes.setting
        )
        self._request = request

    def answer(self, tell: Tell) -> ClosedForm:
        """Return the closed form."""
        return answer_in_closed_form(self._request, self._setting, tell)

    def find_tie_calls(self, form: ClosedForm) -> tuple[TieCall, ...]:
        """Return the calls."""
        if form.ranked is None or not len(form.ties) or form.request.objective == "memory_headroom":
            return ()
        pair = form.ranked.take(np.array([0, form.ties[0]]))
        values = objective_values(pair, form.request.objective, form.prices)[0]
        return find_tie_calls(pair.strategies, values, self._predictor, self._setting.shapes)

    def find_sensitivities(
        self, form: ClosedForm, tell: TellChanged
    ) -> tuple[StrategySensitivity, ...]:
        """Return the changes, of which other batches are asked now."""
        if self._changes is None:
            return ()
        num_points = max(1, len(BATCH_CHANGES) * form.survey.num_points)

        def tell_survey(survey: Survey) -> None:
            ratio = min(1.0, survey.num_points / num_points)
            tell(ratio, f"with other batches: {describe(survey)}")

        return self._changes.find(form, tell_survey)


class MixedCluster:
    """A space of pipelines over devices of several kinds."""

    def __init__(self, request: TrainingSearchRequest, predictor: LatencySource) -> None:
        """Take a request; what its stages run is kept for all that is asked."""
        self._request, self._predictor = request, predictor
        self._book = StageBook.of_request(request)

    def answer(self, tell: Tell) -> ClosedForm:
        """Return the closed form."""
        setting = Setting(predictor=self._predictor)
        return answer_placements(self._request, self._book, setting, tell)

    def find_tie_calls(self, form: ClosedForm) -> tuple[TieCall, ...]:
        """Return none: calls on several kinds of node are not looked at one by one."""
        del form
        return ()

    def find_sensitivities(
        self, form: ClosedForm, tell: TellChanged
    ) -> tuple[StrategySensitivity, ...]:
        """Return the changes, of which each is asked now."""
        if not self._request.has_sensitivity:
            return ()
        changes, found = list_changes(self._request), []
        for number, change in enumerate(changes):

            def tell_survey(
                survey: Survey, number: int = number, words: str = change.words
            ) -> None:
                tell(number / len(changes), f"{words}: {describe(survey)}")

            found.append(
                find_placed_sensitivity(form, change, self._book, self._predictor, tell_survey)
            )
        return tuple(found)


def _check_prices(request: TrainingSearchRequest) -> None:
    devices = request.space.devices or (request.scenario.device,)
    prices = request.space.usd_per_hour
    unpriced = [device for device in dict.fromkeys(devices) if not prices.get(device)]
    if request.objective == "cost" and unpriced:
        raise InvalidRequestError.of_field(
            "space.usd_per_hour", f"to rank by cost, price {', '.join(unpriced)}"
        )
