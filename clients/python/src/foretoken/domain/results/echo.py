"""What an answer says of itself: its question, what it rests on, what would narrow it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from foretoken.domain.measurements.estimate import Provenance

# How people name what estimates rest on, from the strongest to the weakest.
_WORDS: Mapping[str, str] = {
    provenance.name.lower(): word
    for provenance, word in (
        (Provenance.MEASURED, "measured"),
        (Provenance.INTERPOLATED, "interpolated"),
        (Provenance.EXTRAPOLATED, "extrapolated"),
        (Provenance.TRANSFERRED, "transferred from other devices"),
        (Provenance.ANALYTICAL, "data sheet"),
    )
}
# Shares below this are not named.
_LEAST_SHARE = 0.0005


@dataclass(frozen=True, kw_only=True, slots=True)
class Echo:
    """The question in a line, and what the answer rests on.

    `time_ratio_by_provenance` are shares of the predicted time (0 to 1) by `Provenance` in lower
    case; empty where no time was predicted, or none was looked at. `basis` says what they are of,
    or why there are none. `narrowing` is the command that would narrow the answer (empty: its times
    were measured, or there are none). `remarks` say what was simulated in another way than asked,
    `accuracy` how far answers of this kind were off where others measured (empty: not known).
    """

    question: str = ""
    basis: str = ""
    time_ratio_by_provenance: Mapping[str, float] = field(default_factory=dict)
    narrowing: str = ""
    remarks: tuple[str, ...] = ()
    accuracy: str = ""

    @classmethod
    def of_estimate(cls, name: str, shares: Mapping[str, float]) -> Self:
        """Return what the best of a search rests on, which was not simulated."""
        return cls(basis=f"the best, {name}, in closed form", time_ratio_by_provenance=dict(shares))

    def lines(self, label: str = "") -> list[str]:
        """Return what there is to say, a line each; none of an echo that says nothing.

        `label` tells several answers apart.
        """
        start = f"{label}, " if label else ""
        named = (
            ("question", self.question),
            ("rests on", self.describe_basis()),
            ("expected error", self.accuracy),
            ("to narrow it", self.narrowing),
            *(("note", remark) for remark in self.remarks),
        )
        return [f"{start}{name}: {text}" for name, text in named if text]

    def describe_basis(self) -> str:
        """Return the shares in words, and what they are of."""
        shares = describe_time_shares(self.time_ratio_by_provenance)
        return f"{shares} ({self.basis})" if shares and self.basis else shares or self.basis


def describe_time_shares(shares: Mapping[str, float]) -> str:
    """Return shares of time by provenance in words: `62 % measured, 38 % data sheet, by time`."""
    named = [
        f"{100 * shares[name]:.3g} % {word}"
        for name, word in _WORDS.items()
        if shares.get(name, 0.0) >= _LEAST_SHARE
    ]
    return f"{', '.join(named)}, by time" if named else ""
