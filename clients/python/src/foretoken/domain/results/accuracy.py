"""How far answers were off where others measured: a line for each kind of question.

One file each in `accuracy_tables/`, figures as benchmarks printed them. The line that applies to an
answer stands below it, and all of them in docs/reference/accuracy.md, made by

    python -m foretoken.domain.results.accuracy docs/reference/accuracy.md
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from foretoken.domain import schema
from foretoken.domain.measurements.estimate import DType, Provenance
from foretoken.domain.plugins import scan_yaml

_BEGIN, _END = "<!-- accuracy: made by `make docs` -->\n", "<!-- end of accuracy -->"
_OF_DEVICE = (Provenance.MEASURED, Provenance.INTERPOLATED, Provenance.EXTRAPOLATED)
# An answer is of the device's own measurements where these give this share of its time.
_MOST = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedError:
    """How far a figure was off: the mean of absolute errors, 0 to 1.

    `most_ratio` is that of the worst group where groups differ (0: they are one), `median_ratio`
    the median (0: not kept), `signed_ratio` the mean with its sign, above 0 for too long or too
    much (0: not kept).
    """

    name: str
    mean_ratio: float
    most_ratio: float = 0.0
    median_ratio: float = 0.0
    signed_ratio: float = 0.0

    def describe(self) -> str:
        """Return the error in words: `TPOT 12 % (median 10 %)`."""
        said = [f"median {_percent(self.median_ratio)}"] * bool(self.median_ratio)
        if self.signed_ratio:
            way = "long or much" if self.signed_ratio > 0 else "short or little"
            said.append(f"{_percent(abs(self.signed_ratio))} too {way} on average")
        most = f" to {_percent(self.most_ratio)}" if self.most_ratio else " %"
        mean = _percent(self.mean_ratio).removesuffix(" %")
        return f"{self.name} {mean}{most}" + (f" ({', '.join(said)})" if said else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyLine:
    """A kind of question, and what its answers were off by.

    It is for answers of which all facts in `where` hold. `rests_on` says what was measured, and
    how often.
    """

    question: str
    rests_on: str
    errors: tuple[ExpectedError, ...]
    where: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """Return the line as it stands below an answer."""
        errors = ", ".join(error.describe() for error in self.errors)
        return f"{errors}: {self.question}, {self.rests_on}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    source: str
    lines: tuple[AccuracyLine, ...]


@cache
def _tables() -> Mapping[str, _Table]:
    return {
        stem: schema.decode(_Table, dict(content), f"accuracy_tables/{stem}.yaml")
        for stem, content in scan_yaml("foretoken.domain.results", "accuracy_tables")
    }


def describe_accuracy(table: str, facts: Mapping[str, str]) -> str:
    """Return what applies to an answer with these facts, most of them named; empty for nothing."""
    found = [line for line in _tables()[table].lines if line.where.items() <= facts.items()]
    return max(found, key=lambda line: len(line.where)).describe() if found else ""


def grounds_of(shares: Mapping[str, float]) -> str:
    """Return whether most of an answer's time is of the device's own measurements."""
    own = sum(shares.get(member.name.lower(), 0.0) for member in _OF_DEVICE)
    return "device" if own >= _MOST else "others"


def format_name(dtype: DType) -> str:
    """Return how lines about training name a number format."""
    return "8 bit" if dtype is DType.FP8 else "16 bit"


def render_page(text: str) -> str:
    """Return a page with the table of all lines made anew."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return "".join([before, _BEGIN, "\n", *_rows(), "\n", _END, after])


def _rows() -> Iterator[str]:
    yield "| question | expected error | as measured of |\n|---|---|---|\n"
    for table in _tables().values():
        for line in table.lines:
            errors = ", ".join(error.describe() for error in line.errors)
            yield f"| {line.question} | {errors} | {line.rests_on} |\n"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2g} %"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(render_page(page.read_text(encoding="utf-8")), encoding="utf-8")
