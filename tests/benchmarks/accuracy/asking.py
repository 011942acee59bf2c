"""Ask every question of a family, of tables and points drawn by seeds."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from accuracy.family import Family, Question
from accuracy.line import Figure, Line, Scores
from accuracy.source import Measurements
from accuracy.table import MeasuredTable
from accuracy.trial import can_ask, hold_out

Say = Callable[[str], None]
# Fewer repeated points tell nothing about the noise of a table.
_MIN_REPEATS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """How much to ask: how many draws, tables per family and draw, and points per table."""

    num_seeds: int
    max_tables: int
    max_points: int


def ask_family(
    family: Family, measurements: Measurements, extent: Extent, say: Say
) -> Iterator[Line]:
    """Yield a line per question, then the noise floor."""
    tables = list(family.tables(measurements))
    scores = {question.split: Scores() for question in family.questions}
    for seed in range(extent.num_seeds):
        for table in draw_tables(tables, seed, extent):
            say(f"{family.name}, seed {seed}: {table.name}, {table.num_points} points")
            thinned = table.thin(extent.max_points, seed)
            for question in family.questions:
                _ask_one(question, thinned, seed, scores[question.split])
    for question in family.questions:
        found = scores[question.split]
        line = found.summarise(family.name, question.split, question.peer, question.goal)
        if line is not None:
            yield line
    yield from _measure_noise(family.name, tables)


def draw_tables(tables: list[MeasuredTable], seed: int, extent: Extent) -> list[MeasuredTable]:
    """Return the tables of a draw: the next so many of one shuffled round of them all.

    Small tables, all together no more than one may be, are all in every draw.
    """
    count = extent.max_tables
    if len(tables) <= count or sum(table.num_points for table in tables) <= extent.max_points:
        return tables
    order = np.random.default_rng(0).permutation(len(tables))
    places = (np.arange(count) + seed * count) % len(tables)
    return [tables[order[place]] for place in places]


def make_rng(seed: int, *labels: str) -> np.random.Generator:
    """Return a generator of its own for a question asked of a table."""
    digest = hashlib.sha256("|".join([str(seed), *labels]).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


def _ask_one(question: Question, table: MeasuredTable, seed: int, scores: Scores) -> None:
    cut = question.cut_of(table.series.key.spec)
    is_out = cut(table.series.columns, make_rng(seed, table.name, question.split))
    if can_ask(is_out):
        scores.add(table.name, seed, hold_out(table.series, is_out, seed))


def _measure_noise(family: str, tables: Sequence[MeasuredTable]) -> Iterator[Line]:
    repeated = [table.repeat_ratios for table in tables if len(table.repeat_ratios) >= _MIN_REPEATS]
    if repeated:
        yield Line(
            family=family,
            split="same point again",
            found=Figure(
                100.0 * float(np.median([ratios.mean() for ratios in repeated])),
                100.0 * float(np.median([np.quantile(ratios, 0.9) for ratios in repeated])),
            ),
            num_tables=len(repeated),
            num_points=sum(len(ratios) for ratios in repeated),
        )
