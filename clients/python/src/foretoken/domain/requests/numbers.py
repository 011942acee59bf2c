"""Requests with numbers that nothing can be computed with are refused before anything is.

Times, rates and prices are floats, which may be infinite, none at all, or so large or small that
products of them are; sizes of models are integers of 64 bits, of which products are no more.
"""

from collections.abc import Iterator

from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.magnitude import find_beyond, walk
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.units import MAX_COUNT

_MOST_PARAMETERS = 2**50


def check_numbers(request: object) -> None:
    """Refuse a request with numbers that are beyond what is computed with.

    Raises:
        InvalidRequestError: it names all such fields.

    """
    violations: list[FieldViolation] = []
    for path, value in walk(request):
        violations += find_beyond(value, path)
        if isinstance(value, ModelArchitecture):
            violations += _list_large_sizes(value, path)
    if violations:
        raise InvalidRequestError.of_violations(violations)


def _list_large_sizes(model: ModelArchitecture, path: str) -> Iterator[FieldViolation]:
    num_parameters = count_parameters(model).total
    if num_parameters > _MOST_PARAMETERS:
        problem = f"has {num_parameters:.3g} parameters, {_MOST_PARAMETERS:.3g} are counted at most"
        yield FieldViolation(path, problem)
    for name in ("max_position", "sliding_window"):
        if getattr(model, name) > MAX_COUNT:
            yield FieldViolation(f"{path}.{name}", f"may be {MAX_COUNT:,} at most")
