"""The requests of a workload on their way to a plan, and what arrival processes share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.requests.workload import WorkloadSpec
from foretoken.simulator.workload.request_plan import NONE, Ints

Floats = NDArray[np.float64]

# More than this of tokens or requests is a mistake; sums of a billion such still fit into an int64.
MAX_LENGTH = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestDraft:
    """One entry per request; times in s, before windows, scaling and limits are applied.

    Entries of equal `session` (`NONE`: of none) are its turns in order, and their `arrival_s` do
    not fall. `hashes` holds `num_hashes[r]` names for each request in turn. `class_names` are the
    names that `class_index` indexes; None where classes are drawn by their shares. With
    `concurrency` above 0 the loop is closed: `arrival_s` then is an order, and the first requests
    arrive evenly over `ramp_s`. The other columns are those of `RequestPlan`.
    """

    arrival_s: Floats
    num_prefill_tokens: Ints
    num_decode_tokens: Ints
    session: Ints
    think_s: Floats
    stream: Ints
    prefix_stream: Ints
    prefix_tokens: Ints
    num_hashes: Ints
    hashes: Ints
    class_index: Ints
    class_names: tuple[str, ...] | None = None
    hash_block_tokens: int = 0
    concurrency: int = 0
    ramp_s: float = 0.0


# What an arrival plug-in is: (specification, seed) -> requests.
ArrivalProcess = Callable[[WorkloadSpec, int], RequestDraft]


def fill_rows(num_rows: int, value: int) -> Ints:
    """Return a column of one value."""
    return np.full(num_rows, value, dtype=np.int64)


def find_previous_turns(session: Ints) -> Ints:
    """Return for each entry the one before it in its session, `NONE` for first turns."""
    previous = fill_rows(len(session), NONE)
    rows = np.flatnonzero(session != NONE)
    rows = rows[np.argsort(session[rows], kind="stable")]
    is_later = session[rows[1:]] == session[rows[:-1]]
    previous[rows[1:][is_later]] = rows[:-1][is_later]
    return previous


def check_options(spec: WorkloadSpec, known: Sequence[str]) -> None:
    """Check that the arrival process has all options it was given.

    Raises:
        InvalidRequestError: one violation for the first unknown option.

    """
    for name in spec.arrival_options:
        if name not in known:
            choices = ", ".join(known) or "none"
            raise option_error(name, f"{spec.arrival} knows these options: {choices}")


def read_number(
    spec: WorkloadSpec, name: str, default: float, *, can_be_zero: bool = False
) -> float:
    """Return an option that is a positive number, or 0 where that means something.

    Raises:
        InvalidRequestError: it is not.

    """
    text = spec.arrival_options.get(name)
    if text is None:
        return default
    number = _parse_number(name, text)
    if number < 0 or (number == 0 and not can_be_zero):
        needed = "must not be negative" if can_be_zero else "must be positive"
        raise option_error(name, f"{needed}, found {text}")
    return number


def read_numbers(spec: WorkloadSpec, name: str, default: str) -> Floats:
    """Return an option that is a list of numbers of at least 0, written `0.5, 2`.

    Raises:
        InvalidRequestError: one is none, or is negative.

    """
    text = spec.arrival_options.get(name, default)
    numbers = np.array([_parse_number(name, part) for part in text.strip("[] ").split(",")])
    if (numbers < 0).any():
        raise option_error(name, f"must not be negative, found {text}")
    return numbers


def read_loop(spec: WorkloadSpec) -> tuple[int, float]:
    """Return how many requests run at a time, and the time in s over which the first arrive.

    Raises:
        InvalidRequestError: there is no such whole number, or the time is negative.

    """
    if "concurrency" not in spec.arrival_options:
        raise option_error("concurrency", "a closed loop needs how many requests run at a time")
    concurrency = read_number(spec, "concurrency", 1.0)
    if not concurrency.is_integer() or concurrency > MAX_LENGTH:
        raise option_error("concurrency", f"must be a whole number, found {concurrency:g}")
    return int(concurrency), read_number(spec, "ramp_s", 0.0, can_be_zero=True)


def option_error(name: str, description: str) -> InvalidRequestError:
    """Return the error about an option of the arrival process."""
    return InvalidRequestError.of_field(f"workload.arrival_options.{name}", description)


def _parse_number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not np.isfinite(number):
        raise option_error(name, f"expected a number, found {text.strip()!r}")
    return number
