"""What an operator is: its dimensions, its work, and how to sweep it.

Formulas take a mapping of dimension name to an int or to a column of ints, and use only
arithmetic operators, so that they serve single calls and whole tables alike.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from foretoken.domain.errors import FieldViolation, InvalidRequestError, UnknownOperatorError
from foretoken.domain.measurements.estimate import Phase
from foretoken.domain.plugins import scan_modules
from foretoken.domain.units import Quantity

Dims = Mapping[str, Quantity]
# (dims, bytes of one element) -> work
WorkFormula = Callable[[Dims, float], Quantity]
# (dims, number of streaming multiprocessors) -> a dimensionless feature
FeatureFormula = Callable[[Dims, int], Quantity]
# dims -> another operator and its dims
ProxyOperator = Callable[[Dims], tuple[str, Dims]]


def _nothing(_dims: Dims) -> Quantity:
    return 0


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of an operator. `minimum` is 0 where the operator allows an empty one."""

    name: str
    meaning: str
    minimum: int = 1


@dataclass(frozen=True, slots=True)
class Relation:
    """What must hold between two dimensions: `dim` is at most `other`, or with `divides` a part."""

    dim: str
    other: str
    divides: bool = False

    def find_violation(self, dims: Dims) -> FieldViolation | None:
        """Return the first call of a column, or the one, that contradicts itself; None if none."""
        dim, other = dims[self.dim], dims[self.other]
        broken = _first_broken(other % dim != 0 if self.divides else dim > other, dim, other)
        if broken is None:
            return None
        rule = "must divide" if self.divides and broken[0] <= broken[1] else "is more than"
        return FieldViolation(self.dim, f"{broken[0]} {rule} the {broken[1]} of {self.other}")


@dataclass(frozen=True, slots=True)
class Bound:
    """What the others leave of a dimension: at most `limit`, or with `is_least` no less.

    `limit` gives a whole number from all dimensions, `meaning` says in words what it is.
    """

    dim: str
    limit: Callable[[Dims], Quantity]
    meaning: str
    is_least: bool = False

    def find_violation(self, dims: Dims) -> FieldViolation | None:
        """Return the first call of a column, or the one, that contradicts itself; None if none."""
        # Products of two columns may be beyond 64 bits; as floats only such are not exact.
        exact = {name: value * 1.0 if _is_column(value) else value for name, value in dims.items()}
        dim, limit = dims[self.dim], self.limit(exact)
        broken = _first_broken(dim < limit if self.is_least else dim > limit, dim, limit)
        if broken is None:
            return None
        rule = "less" if self.is_least else "more"
        return FieldViolation(self.dim, f"{broken[0]} is {rule} than {broken[1]}, {self.meaning}")


def _is_column(value: Quantity) -> bool:
    return hasattr(value, "argmax")


def _first_broken(is_wrong: Quantity, *values: Quantity) -> list[int] | None:
    """Return the values of the first wrong row, of columns or numbers; None where none is wrong."""
    if not _is_column(is_wrong):
        return [int(value) for value in values] if is_wrong else None
    if not is_wrong.any():
        return None
    row = int(is_wrong.argmax())
    return [int(value[row] if _is_column(value) else value) for value in values]


# Each key and value head answers for equally many query heads.
HEAD_RELATION = Relation("num_kv_heads", "num_heads", divides=True)


def dim_axes(*names: str) -> dict[str, FeatureFormula]:
    """Return axes that are dimensions themselves."""
    return {name: lambda d, _, name=name: d[name] for name in names}  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorSpec:
    """A logical computation, independent of the kernel that runs it.

    `flops` counts a multiply-add as two; `moved_bytes` is the least traffic with device memory.
    `features` are dimensionless quantities that explain how far a kernel stays from its roofline.
    `costs` are quantities, none negative, that latency may grow in proportion to, besides FLOPs and
    bytes: blocks, waves of blocks. Of those that points cannot tell apart the last counts: products
    of more dimensions come later. `axes` are coordinates in which calls are near or far, as one
    sweeps them (the length of a sequence, not the sum over the batch); none means the dimensions.
    `relations` are what must hold between dimensions: a call that breaks one cannot be.
    `sweep(quick)` yields the points worth measuring; `quick` yields about a dozen small ones.
    It yields none where rows are only imported; such an operator needs no kernel.
    `backward_work_ratio` is backward over forward work where a backward pass exists (0: none).
    `group` is the kind of kernel; a breakdown adds up a group's time, a correction stretches it.
    `num_weights` counts the parameters the operator holds; `saved_elements` the values it keeps
    from the forward pass for its backward pass, its output not counted (the next operator's input).
    A collective moves `moved_bytes` over links instead of memory; it has no FLOPs. With
    `shares_node_links` its ranks on a node send each byte to another node once for all of them.
    `proxy_operator` names a call of another operator, in the same number format, that takes about
    as long: it answers where this one was not measured. `backward_calls` are the forward calls a
    backward pass is made of, for where that was not measured. `chain_ratios` are how many times as
    long as one kernel the chain of operators takes that eager PyTorch runs in its place
    (`form=eager`), in the forward and the backward pass, for where that was not measured, and
    `chain_kernels` how many kernels that chain has.
    `num_launches` kernels are what engines run a call as, which the host launches one by one.
    """

    name: str
    summary: str
    dims: tuple[Dim, ...]
    flops: WorkFormula
    moved_bytes: WorkFormula
    features: Mapping[str, FeatureFormula] = field(default_factory=dict)
    costs: Mapping[str, FeatureFormula] = field(default_factory=dict)
    axes: Mapping[str, FeatureFormula] = field(default_factory=dict)
    relations: tuple[Relation | Bound, ...] = ()
    sweep: Callable[[bool], Iterable[Mapping[str, int]]]
    backward_work_ratio: float = 0.0
    is_collective: bool = False
    shares_node_links: bool = False
    group: str = "elementwise"
    num_weights: Callable[[Dims], Quantity] = _nothing
    saved_elements: Callable[[Dims], Quantity] = _nothing
    proxy_operator: ProxyOperator | None = None
    backward_calls: Callable[[Dims], tuple[Dims, ...]] | None = None
    chain_ratios: tuple[float, float] = (1.0, 1.0)
    chain_kernels: tuple[int, int] = (1, 1)
    num_launches: int = 1

    @property
    def dim_names(self) -> tuple[str, ...]:
        """Names of the dimensions in their canonical order."""
        return tuple(dim.name for dim in self.dims)

    def check_dims(self, dims: Mapping[str, int]) -> None:
        """Check that `dims` names exactly this operator's dimensions with legal values.

        Raises:
            InvalidRequestError: one violation per missing, unknown or too small dimension.

        """
        violations = [
            FieldViolation(name, f"{self.name} has no such dimension; it has {self.dim_names}")
            for name in dims
            if name not in self.dim_names
        ]
        for dim in self.dims:
            if dim.name not in dims:
                violations.append(FieldViolation(dim.name, f"missing ({dim.meaning})"))
            elif dims[dim.name] < dim.minimum:
                violations.append(FieldViolation(dim.name, f"must be at least {dim.minimum}"))
        if violations:
            raise InvalidRequestError.of_violations(violations, self.name)

    def check_call(self, dims: Mapping[str, int]) -> None:
        """Check the dimensions of a call, and that they do not contradict each other.

        Raises:
            InvalidRequestError: as `check_dims`, or one violation for each broken relation.

        """
        self.check_dims(dims)
        if violations := self.find_contradictions(dims):
            raise InvalidRequestError.of_violations(violations, self.name)

    def find_contradictions(self, dims: Dims) -> list[FieldViolation]:
        """Return the relations that dimensions break, each legal by itself, or columns of them."""
        found = (relation.find_violation(dims) for relation in self.relations)
        return [violation for violation in found if violation is not None]

    def work_ratio(self, phase: Phase) -> float:
        """Return the work of a phase over that of the forward pass."""
        return 1.0 if phase is Phase.FORWARD else self.backward_work_ratio


@cache
def all_operators() -> dict[str, OperatorSpec]:
    """Return every operator by name: one file each in `domain/operators`."""
    specs = scan_modules("foretoken.domain.operators", "SPEC").values()
    return {spec.name: spec for spec in specs}


def find_operator(name: str) -> OperatorSpec:
    """Return the operator of that name.

    Raises:
        UnknownOperatorError: there is none; the message names the nearest.

    """
    return UnknownOperatorError.look_up(name, all_operators())
