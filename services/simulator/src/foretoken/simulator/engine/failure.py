"""What an engine of a compiled pool loses when it fails."""

from collections.abc import Sequence

import numpy as np

from foretoken.simulator.engine import layout
from foretoken.simulator.engine.layout import NONE, Ints, Records
from foretoken.simulator.engine.output import PREFILL_COLUMNS, Slice, open_runs
from foretoken.simulator.engine.state import EngineState

# Fields of an engine that are a place in a list.
_PLACES = tuple(name for name in layout.ENGINE.names or () if name.startswith(("first_", "last_")))
# Those that outlive it; a scheduler counts from the step it begins at.
_KEPT = ("unit", "num_steps", "num_slots", "first_spare")


def clear_unit(state: EngineState, slices: list[Slice], engine: int) -> Sequence[int]:
    """Empty the engines in lock step with one; return their requests that had not ended, ascending.

    The output, which has been taken, loses the prompts of batches in flight, and gets the token
    runs that went on.
    """
    arrays = state.arrays
    engines, requests = arrays["engines"], arrays["requests"]
    place = int(engines["unit"][engine])
    unit = arrays["units"][place]
    first, count = int(unit["first_engine"]), int(unit["num_engines"])
    of_unit = (requests["engine"] >= first) & (requests["engine"] < first + count)
    unended = np.flatnonzero(of_unit & (requests["is_on_engine"] == 1))
    requests["is_on_engine"][unended] = 0
    _end_runs(slices, requests, unended)
    for index in range(first, first + count):
        engines["num_steps"][index] -= unit["num_flights"]
        _drop_prefills(slices, index, int(engines["num_steps"][index]))
        _clear_engine(state, index)
    for name in ("num_flights", "first_flight", "is_steady", "host_free_ns", "output_free_ns"):
        unit[name] = 0
    unit["tick"], unit["next_ns"] = layout.IDLE, layout.NEVER_NS
    arrays["stage_free"][place] = 0
    state.record["next_ns"] = arrays["units"]["next_ns"].min()
    found: list[int] = unended.tolist()
    return found


def _end_runs(slices: list[Slice], requests: Records, unended: Ints) -> None:
    going = unended[requests["run_count"][unended] > 0]
    runs = open_runs(requests, going).astype(np.int32)
    slices[-1] = slices[-1]._replace(runs=np.concatenate([slices[-1].runs, runs]))
    requests["run_count"][going] = 0


def _drop_prefills(slices: Sequence[Slice], engine: int, num_steps: int) -> None:
    """Drop what was computed in steps from a number on."""
    for output in reversed(slices):
        columns = output.steps[engine]
        count = int(np.searchsorted(columns["prefill_step"], num_steps))
        if 0 < count == len(columns["prefill_step"]):
            return
        for name in PREFILL_COLUMNS:
            columns[name] = columns[name][:count]


def _clear_engine(state: EngineState, index: int) -> None:
    """Take all off an engine: requests, blocks, names, what its scheduler knows."""
    rules, engine = state.record[0], state.arrays["engines"][index]
    _free_blocks(state, index)
    for name in engine.dtype.names:
        if name not in _KEPT:
            engine[name] = NONE if name in _PLACES else 0
    engine["num_free"] = rules["num_blocks"]
    if rules["is_caching"]:
        _clear_cache(state, index)
    _clear_tiers(state, index)


def _free_blocks(state: EngineState, index: int) -> None:
    """Take the blocks of all requests of an engine, and give back the slots they were listed in."""
    arrays = state.arrays
    engine, requests = arrays["engines"][index], arrays["requests"]
    here = np.flatnonzero(requests["engine"] == index)
    requests["num_blocks"][here] = 0
    holding = here[requests["slot"][here] != NONE]
    if len(holding):
        first = int(engine["num_slots"])
        arrays["slots"][index, first : first + len(holding)] = requests["slot"][holding]
        engine["num_slots"] += len(holding)
        requests["slot"][holding] = NONE


def _clear_cache(state: EngineState, index: int) -> None:
    rules, arrays = state.record[0], state.arrays
    size, num_buckets = int(rules["num_blocks"]) + 1, int(rules["num_buckets"])
    blocks: Records = arrays["blocks"][index * size : (index + 1) * size]
    place = np.arange(size)
    blocks["key"] = blocks["num_users"] = 0
    blocks["next"] = index * size + (place + 1) % size
    blocks["previous"] = index * size + (place - 1) % size
    blocks["chain"] = NONE
    arrays["buckets"][index * num_buckets : (index + 1) * num_buckets] = NONE


def _clear_tiers(state: EngineState, index: int) -> None:
    """Empty the tiers of an engine, unless all share them, and its links to them."""
    rules, arrays = state.record[0], state.arrays
    tiers = arrays["tiers"][index]
    for name in ("read_free_ns", "write_free_ns"):
        tiers[name] = 0
    if rules["is_store_shared"]:
        return
    for name in ("num_swapped", "num_kept"):
        tiers[name] = 0
    tiers["first_kept"] = tiers["last_kept"] = NONE
    size, num_buckets = int(rules["num_stored"]), int(rules["num_stored_buckets"])
    first = index * size
    arrays["stored"]["next"][first : first + size] = np.arange(first + 1, first + size + 1)
    arrays["stored_buckets"][index * num_buckets : (index + 1) * num_buckets] = NONE
    arrays["engines"]["first_spare"][index] = first
