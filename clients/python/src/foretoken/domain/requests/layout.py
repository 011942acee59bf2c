"""How a model is spread over devices."""

from dataclasses import dataclass

from foretoken.domain.errors import FieldViolation, InvalidRequestError

# More than any cluster has; ranks are made one by one.
MOST_DEVICES = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Degrees of the parallel axes: tensor, pipeline, data, context, expert.

    `communication.py` says how ranks are numbered. `ep` splits experts over ranks of the other
    axes, so it adds no devices. Data-parallel engines that serve share their experts where `ep` is
    above 1, and with `attention_dp` where it is not: then all their ranks split every expert. Else
    they are replicas.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    attention_dp: bool = False

    def __post_init__(self) -> None:
        """Refuse degrees below one, and more devices than there are."""
        violations = [
            FieldViolation(axis, "a degree must be at least 1")
            for axis in ("tp", "pp", "dp", "cp", "ep")
            if getattr(self, axis) < 1
        ]
        if violations:
            raise InvalidRequestError(f"layout: {violations[0].field} must be >= 1", violations)
        most = max(self.num_devices, self.ep)
        if most > MOST_DEVICES:
            problem = f"has {most:,} devices, which may be {MOST_DEVICES:,} at most"
            raise InvalidRequestError.of_field("layout", problem)

    def degree(self, axis: str) -> int:
        """Return the degree of an axis by name."""
        return int(getattr(self, axis))

    @property
    def shares_experts(self) -> bool:
        """Whether data-parallel engines share experts, and step together."""
        return self.dp > 1 and (self.ep > 1 or self.attention_dp)

    @property
    def num_devices(self) -> int:
        """Devices the whole layout occupies."""
        return self.tp * self.pp * self.dp * self.cp
