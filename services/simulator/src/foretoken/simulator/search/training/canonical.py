"""Strategies that say the same as another of their space, of which the other is kept.

Each rule holds only where the space has that other one, which breaks nothing the first does not.
With them are interleaved chunks on a pipeline of one rank, which trainers refuse, and chunks that
are unequal even when the embedding and the head count as a layer each, which Megatron-LM runs only
by a layout written out.
Source: Megatron-LM, `arguments.py` (an interleaved schedule needs more than one pipeline stage) and
`transformer_config.py` (layers, with the embedding and the head where these are accounted for, that
the stages and their chunks divide).
"""

import numpy as np

from foretoken.domain.models.stack import stack_of
from foretoken.domain.requests.training_search import OVERLAPS, WEIGHT_PARALLELS
from foretoken.simulator.grid import Flags
from foretoken.simulator.search.training.space import StrategySpace
from foretoken.simulator.steps.pipelines.schedule import find_schedule
from foretoken.simulator.steps.strategies import Strategies

_PLAIN, _MSP, _FSP, _ISP = (WEIGHT_PARALLELS.index(name) for name in ("", "msp", "fsp", "isp"))
_DATA, _ALL = OVERLAPS.index("data"), OVERLAPS.index("all")

INTERLEAVED_ALONE = "virtual_stages"
INTERLEAVED_UNEVENLY = "virtual_stages: unequal chunks"
# By verdict, why a strategy is left out.
REASONS = {
    "redundant: sequence_parallel": (
        "the same without sequence_parallel: it splits tokens over tp, and msp and fsp do it anyway"
    ),
    "redundant: weight_parallel": (
        "the same without weight_parallel: msp, fsp and isp over one rank split nothing, and fsp is"
        " sequence_parallel with the gradients' collectives hidden, which overlap all hides anyway"
    ),
    "redundant: zero_stage": (
        "the same with a lower zero_stage: ZeRO splits states over ranks that hold the same, and"
        " there is one"
    ),
    "redundant: overlap": "the same with less overlap: there are no more exchanges to hide",
    INTERLEAVED_ALONE: (
        "a pipeline of one rank has nothing to interleave, and trainers refuse it: virtual_stages 1"
    ),
    INTERLEAVED_UNEVENLY: (
        "interleaved chunks have unequal numbers of layers, also with the embedding and the head"
        " counted as a layer each: Megatron-LM cuts so only by --pipeline-model-parallel-layout."
        " Leave virtual_stages 1 out of the space to try them all the same"
    ),
}


def find_redundant(strategies: Strategies, space: StrategySpace) -> dict[str, Flags]:
    """Return by verdict which strategies another of the space stands for."""
    found = (
        _repeats_token_split(strategies, space),
        _repeats_plain_layers(strategies, space),
        _repeats_states(strategies, space),
        _repeats_overlap(strategies, space),
        _interleaves_nothing(strategies, space),
        _interleaves_unevenly(strategies, space),
    )
    return dict(zip(REASONS, found, strict=True))


def _repeats_token_split(strategies: Strategies, space: StrategySpace) -> Flags:
    known = set(space.rows_of("sequence_parallel"))
    has_other = [
        (form, degree) for split, form, degree in known if split and (0, form, degree) in known
    ]
    repeats: Flags = np.zeros(len(strategies), dtype=np.bool_)
    is_split_anyway = np.isin(strategies.weight_parallel, (_MSP, _FSP))
    for form, degree in has_other:
        repeats |= (strategies.weight_parallel == form) & (strategies.weight_degree == degree)
    repeats &= (strategies.sequence_parallel == 1) & (is_split_anyway | (strategies.tp == 1))
    return repeats


def _repeats_plain_layers(strategies: Strategies, space: StrategySpace) -> Flags:
    known = set(space.rows_of("weight_parallel"))
    is_of_one = np.isin(strategies.weight_parallel, (_MSP, _FSP))
    is_of_one |= (strategies.weight_parallel == _ISP) & (strategies.weight_degree == 1)
    has_other = np.array([(split, _PLAIN, 0) in known for split in (0, 1)])
    repeats: Flags = is_of_one & (strategies.tp == 1) & has_other[strategies.sequence_parallel]
    if has_other[1]:
        is_hidden = (strategies.weight_parallel == _FSP) & (strategies.overlap == _ALL)
        repeats |= is_hidden & (strategies.tp > 1)
    return repeats


def _repeats_states(strategies: Strategies, space: StrategySpace) -> Flags:
    least = min(stage for stage, _ in space.rows_of("zero_stage"))
    is_alone = (strategies.replicas == 1) & (strategies.dp * strategies.cp == 1)
    repeats: Flags = is_alone & (strategies.zero_stage > least)
    return repeats


def _repeats_overlap(strategies: Strategies, space: StrategySpace) -> Flags:
    known = [code for (code,) in space.rows_of("overlap")]
    is_whole = (strategies.tp == 1) & (strategies.cp == 1)
    repeats: Flags = is_whole & (strategies.dp == 1) & (strategies.overlap > min(known))
    if _DATA in known and not stack_of(strategies.source.scenario.model).experts:
        repeats |= is_whole & (strategies.overlap == _ALL)
    return repeats


def _interleaves_nothing(strategies: Strategies, space: StrategySpace) -> Flags:
    repeats: Flags = (strategies.pp == 1) & (strategies.virtual_stages > 1) & _has_whole(space)
    return repeats


def _interleaves_unevenly(strategies: Strategies, space: StrategySpace) -> Flags:
    names = strategies.source.pipeline_schedules
    is_free = np.array([find_schedule(name).virtual_stages == 0 for name in names])
    num_chunks = strategies.pp * strategies.virtual_stages
    num_layers = strategies.source.scenario.model.num_layers
    is_uneven = np.logical_and.reduce([(num_layers + ends) % num_chunks != 0 for ends in (0, 1, 2)])
    is_interleaved = is_free[strategies.pipeline_schedule] & (strategies.virtual_stages > 1)
    repeats: Flags = is_interleaved & is_uneven & (strategies.pp > 1) & _has_whole(space)
    return repeats


def _has_whole(space: StrategySpace) -> bool:
    """Tell whether the space has ranks with one chunk of layers."""
    return any(chunks == 1 for *_, chunks in space.rows_of("virtual_stages"))
