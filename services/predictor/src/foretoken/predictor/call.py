"""A table of calls of one operator, and what they run on."""

from dataclasses import dataclass

from foretoken.domain.measurements.estimate import OperatorTable
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.roofline import Columns, Target


@dataclass(frozen=True, slots=True)
class Call:
    """A table of calls, and what they run on."""

    spec: OperatorSpec
    table: OperatorTable
    columns: Columns
    target: Target
