"""Programs of passes made shorter and joined, so that very many run through the streams at once.

Only how long passes take is asked, not which collective is waited for: those of one stream are
alike, and those that are waited for one after the other are one step. Where nothing runs beside
computation, or what does slows nothing down, all of that is one step too.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from foretoken.domain.lowering.graph import Overlap
from foretoken.simulator.steps.passes import PassParts
from foretoken.simulator.steps.program import (
    Column,
    Communicate,
    CommunicationKey,
    Compute,
    Program,
)


def shorten_passes(passes: Sequence[PassParts], slowdown_ratio: float) -> list[PassParts]:
    """Return the same passes in fewer steps."""
    programs = {id(program): program for item in passes for program in _programs(item)}
    is_free = slowdown_ratio == 1 or not any(map(_has_overlap, programs.values()))
    slots: dict[Hashable, int] = {}
    short = {
        number: _shorten(program, slots, joins=is_free) for number, program in programs.items()
    }
    return [
        PassParts(
            head=short[id(item.head)],
            runs=tuple((short[id(program)], counts) for program, counts in item.runs),
            tail=short[id(item.tail)],
            heads=item.heads,
        )
        for item in passes
    ]


def outline_passes(passes: Sequence[PassParts]) -> Hashable:
    """Return what the steps of passes are, whatever they take."""
    known: dict[int, Hashable] = {}

    def outline(program: Program) -> Hashable:
        if id(program) not in known:
            known[id(program)] = tuple(_outline_step(step) for step in program)
        return known[id(program)]

    return tuple(
        (
            outline(item.head),
            tuple((outline(program), counts) for program, counts in item.runs),
            outline(item.tail),
            item.heads,
        )
        for item in passes
    )


def join_passes(families: Sequence[Sequence[PassParts]]) -> list[PassParts]:
    """Return the passes of families with the same outline as one, with the columns of all."""
    if len(families) == 1:
        return list(families[0])
    joiner = _Joiner()
    return [
        PassParts(
            head=joiner.join([item.head for item in passes]),
            runs=tuple(
                (joiner.join([item.runs[number][0] for item in passes]), counts)
                for number, (_, counts) in enumerate(passes[0].runs)
            ),
            tail=joiner.join([item.tail for item in passes]),
            heads=passes[0].heads,
        )
        for passes in zip(*families, strict=True)
    ]


def _programs(parts: PassParts) -> tuple[Program, ...]:
    return (parts.head, *(program for program, _ in parts.runs), parts.tail)


def _has_overlap(program: Program) -> bool:
    return any(
        step.beside if isinstance(step, Compute) else step.overlap is not Overlap.EXPOSED
        for step in program
    )


def _shorten(program: Program, slots: dict[Hashable, int], *, joins: bool) -> Program:
    """Return a program in fewer steps; `slots` are the numbers of what is prefetched so far."""
    steps: list[Compute | Communicate] = []
    computed: Column | None = None
    waited: Column | None = None
    for step in program:
        is_plain = isinstance(step, Compute) and not step.beside
        if joins and is_plain:
            computed = step.time_us if computed is None else computed + step.time_us
        elif isinstance(step, Communicate) and step.overlap is Overlap.EXPOSED:
            waited = step.time_us if waited is None else waited + step.time_us
        else:
            steps += _plain_steps(computed, waited)
            computed = waited = None
            steps.append(_rename(step, slots))
    steps += _plain_steps(computed, waited)
    return tuple(steps)


def _plain_steps(computed: Column | None, waited: Column | None) -> list[Compute | Communicate]:
    found: list[Compute | Communicate] = [] if computed is None else [Compute(computed)]
    if waited is not None:
        found.append(Communicate(Overlap.EXPOSED, ("", ""), waited))
    return found


def _rename(step: Compute | Communicate, slots: dict[Hashable, int]) -> Compute | Communicate:
    if isinstance(step, Compute):
        beside = tuple((_stream(key), time_us) for key, time_us in step.beside)
        return Compute(step.time_us, beside) if beside else step
    if step.overlap is not Overlap.PREFETCH:
        return Communicate(step.overlap, _stream(step.key), step.time_us)
    slot = slots.setdefault(step.slot, len(slots))
    return Communicate(step.overlap, _stream(step.key), step.time_us, slot)


def _stream(key: CommunicationKey) -> CommunicationKey:
    """Return what a collective is counted under: its stream alone."""
    return "", key[1]


def _outline_step(step: Compute | Communicate) -> Hashable:
    if isinstance(step, Compute):
        return tuple(key for key, _ in step.beside)
    return step.overlap, step.key, step.slot


class _Joiner:
    """Joins programs, each combination once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Program] = {}

    def join(self, programs: Sequence[Program]) -> Program:
        key = tuple(map(id, programs))
        if key not in self._known:
            steps = zip(*programs, strict=True)
            self._known[key] = tuple(_join_steps(step) for step in steps)
        return self._known[key]


def _join_steps(steps: Sequence[Any]) -> Compute | Communicate:
    time_us = np.concatenate([step.time_us for step in steps], axis=-1)
    first = steps[0]
    if isinstance(first, Communicate):
        return dataclasses.replace(first, time_us=time_us)
    beside = tuple(
        (key, np.concatenate([step.beside[number][1] for step in steps], axis=-1))
        for number, (key, _) in enumerate(first.beside)
    )
    return Compute(time_us, beside)
