"""InternEvo's simulator's counts, against its loop and its formulas written out point by point."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.models.architecture import ModelArchitecture, find_model
from foretoken.domain.units import GIB
from foretoken.simulator.search.internevo.question import build_request
from foretoken.simulator.search.internevo.simulator_verdicts import (
    SimulatorVerdicts,
    judge_by_simulator,
    measure_by_formula,
)
from foretoken.simulator.steps.legality import judge_legality

_MODEL = find_model("internlm2-7b")
_SAMPLE = 2048


@dataclass(frozen=True)
class _Point:
    algo: str
    pp: int
    sp: int
    wp: int
    zo: int
    dp: int
    micro_bsz: int
    micro_num: int
    ckpt: bool


def _judge(
    world_size: int, num_samples: int, model: ModelArchitecture = _MODEL
) -> SimulatorVerdicts:
    return judge_by_simulator(
        build_request(
            model, "a100_sxm_80", world_size=world_size, global_batch_size=num_samples * _SAMPLE
        )
    )


def _loop(world_size: int, num_samples: int, model: ModelArchitecture) -> Iterator[_Point]:
    """Yield the points in the order of the simulator's nested loops."""
    degrees = [1, 2, 4, 6, 8, *range(16, world_size + 1, 8)]
    for pp in (2**power for power in range(10) if 2**power <= min(world_size, model.num_layers)):
        for sp in degrees:
            if model.num_kv_heads % sp or world_size % (pp * sp):
                continue
            dp = world_size // pp // sp
            own, rest = divmod(num_samples, dp)
            for size in range(1, own + 1) if not rest else ():
                if own % size or own // size < pp:
                    continue
                for algo in ("isp", "msp", "fsp"):
                    for ckpt in (False, True):
                        for wp in degrees if algo == "isp" else (1,):
                            ranks = world_size // pp // (wp if algo == "isp" else sp)
                            for zo in range(1, ranks + 1):
                                yield _Point(algo, pp, sp, wp, zo, dp, size, own // size, ckpt)


def _count(world_size: int, num_samples: int, model: ModelArchitecture) -> tuple[int, ...]:
    """Count as the simulator does, with one configuration for all points."""
    configuration: dict[str, int] = {}
    tried = legal = fitting = refused = 0
    for point in _loop(world_size, num_samples, model):
        tried += 1
        stage = world_size // point.pp
        split = point.wp if point.algo == "isp" else point.sp
        if stage % split or (stage // split) % point.zo:
            continue
        if "gradient_accumulation" not in configuration:
            configuration["gradient_accumulation"] = point.micro_num
        elif point.pp == 1 and configuration["gradient_accumulation"] != point.micro_num:
            refused += 1
            continue
        legal += 1
        fitting += _gib(point, model) <= 80
    return tried, legal, fitting, refused


def _gib(point: _Point, model: ModelArchitecture) -> float:
    """Return the memory of a point, term by term."""
    h, layers, sp = model.hidden, model.num_layers, point.sp
    mlp = 256 * ceil(model.intermediate / 256)
    block = 2 * h + 2 * h * h + 2 * h * (h * model.num_kv_heads // model.num_heads) + 3 * h * mlp
    blocks = ceil(layers / point.pp) * block / (point.wp if point.algo == "isp" else sp)
    embedding = (2 if point.pp == 1 else 1) * model.vocab * h / sp
    if point.algo == "isp":
        states = 12 * (blocks / point.zo + embedding / (2 if point.dp > 1 else 1))
    else:
        states = 12 * (blocks + embedding) / point.zo
    weights = 4 * (blocks + embedding)
    bsh = point.micro_bsz * _SAMPLE * h
    units = {"isp": 118 / 3 / sp, "fsp": 118 / 3 / sp, "msp": 4 + 106 / 3 / sp}[point.algo]
    terms = [
        weights,
        states,
        layers * (2 * bsh // sp) if point.ckpt else layers * units * bsh,
        4 * bsh // sp,  # norm, fp32
        0 if point.algo == "msp" else 2 * bsh // sp,  # input of the head
        2 * point.micro_bsz * _SAMPLE * model.vocab // sp,  # logits
        4 * bsh + 4 * bsh / sp + 2 * h * model.vocab / sp,  # peak of the backward pass
        8 * (4 * h * h + 3 * mlp * h) if point.algo == "isp" else 0,  # pool of gathered weights
        2 * (layers // point.pp) * _SAMPLE * (h // model.num_heads),  # rotary
        2 * (_SAMPLE // sp) * point.micro_bsz * h if point.pp > 1 else 0,  # sent on
    ]
    return max(sum(terms), weights + states * 5 / 3) / GIB


def test_its_published_question_has_its_counts() -> None:
    """InternLM2 7B, 128 devices, 4,194,304 tokens: what the simulator itself prints."""
    verdicts = _judge(128, 2048)
    assert (verdicts.num_tried, verdicts.num_legal, verdicts.num_fitting) == (39_932, 6_176, 5_198)
    assert verdicts.first_micro_num == 2048 // 128


@given(half=st.integers(1, 12), num_samples=st.integers(1, 64))
@example(half=16, num_samples=7)
@settings(deadline=None, max_examples=30)
def test_counts_are_those_of_its_loop(half: int, num_samples: int) -> None:
    """7 samples suit 32 devices as one replica alone, of 4 stages; so the first point has 4."""
    verdicts = _judge(2 * half, num_samples)
    counts = (
        verdicts.num_tried,
        verdicts.num_legal,
        verdicts.num_fitting,
        verdicts.num_refused,
    )
    assert counts == _count(2 * half, num_samples, _MODEL)


def test_counts_of_another_model_are_those_of_its_loop() -> None:
    """Layers that stages do not share evenly, and a width of the MLP that is rounded up."""
    model = dataclasses.replace(_MODEL, num_layers=6, intermediate=11_000, num_kv_heads=32)
    verdicts = _judge(16, 64, model)
    counts = (
        verdicts.num_tried,
        verdicts.num_legal,
        verdicts.num_fitting,
        verdicts.num_refused,
    )
    assert counts == _count(16, 64, model)


def test_memory_of_each_point_is_its_formula() -> None:
    verdicts = _judge(16, 64)
    found = measure_by_formula(verdicts.points, _MODEL, _SAMPLE) / GIB
    # The points are in another order: recomputation is outside of the algorithms.
    expected = sorted(_gib(point, _MODEL) for point in _loop(16, 64, _MODEL))
    assert np.sort(found) == pytest.approx(np.array(expected))


def test_what_can_run_is_what_a_search_says_can_run() -> None:
    """Points that divide are InternEvo's own rule; the refusal is the simulator's alone."""
    verdicts = _judge(24, 48)
    np.testing.assert_array_equal(judge_legality(verdicts.points) == 0, verdicts.is_divisible)
    refused = verdicts.points.take(verdicts.is_refused)
    assert set(refused.pp.tolist()) == {1}
    assert verdicts.first_micro_num not in set(refused.num_micro_batches.tolist())


def test_names_are_of_its_solutions() -> None:
    verdicts = _judge(8, 32)
    assert len(verdicts.list_names()) == verdicts.num_fitting


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (find_model("mixtral-8x7b"), "no formula for experts"),
        (dataclasses.replace(_MODEL, num_kv_heads=1), "odd number of key heads"),
    ],
)
def test_what_it_does_not_answer_is_refused(model: ModelArchitecture, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        _judge(8, 32, model)
