"""Why a strategy is ruled out, in the words in which a simulation refuses it."""

from dataclasses import replace

import numpy as np

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.scenario import TrainingScenario
from foretoken.simulator.rank import chunk_ranks
from foretoken.simulator.steps.legality import device_limit
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.steps.strategies import Strategies
from foretoken.simulator.steps.trainer_limit import list_lacks
from foretoken.simulator.training.scenario_checks import check_chunks, check_scenario


def explain(strategies: Strategies, row: int) -> str:
    """Return why the simulator cannot run a strategy, in its words; empty where it can."""
    one = strategies.take(np.array([row]))
    limit = device_limit(one)
    if limit.is_broken[0]:
        return f"{limit.field}: {limit.reason()}"
    return _find_problem(one.scenario(0)) or _find_lack(one)


def _find_lack(one: Strategies) -> str:
    """Return what a framework has not of a strategy, in its words."""
    for bound in one.source.bounds:
        if lacks := list_lacks(one, bound):
            return InvalidRequestError.of_violations(lacks).message
    return ""


def explain_cut(one: Strategies) -> str:
    """Return why no strategy of a space has the values of this one, which may break other rules."""
    return _find_lack(one) or (
        f"{one.source.bounds[0].name}: hides the same with less overlap, what differs cannot be"
        " turned on or off"
    )


def _find_problem(scenario: TrainingScenario) -> str:
    """Return what `simulate_training` refuses a scenario for; empty where nothing is wrong.

    Raises:
        UnknownDeviceError, UnknownTopologyError, UnknownPluginError: no such name.

    """
    schedule = find_schedule(scenario.pipeline_schedule)
    try:
        check_scenario(scenario)
        chunks = schedule.virtual_stages or scenario.virtual_stages
        scenario = replace(scenario, virtual_stages=chunks)
        check_chunks(chunk_ranks(scenario), scenario)
        schedule.orders(scenario.layout.pp, scenario.num_micro_batches, chunks)
    except InvalidRequestError as err:
        return err.message
    return ""
