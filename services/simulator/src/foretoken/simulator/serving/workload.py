"""Turn a workload specification into requests."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.plugins import scan_modules
from foretoken.domain.workload import LengthSpec, Request, WorkloadSpec
from foretoken.simulator.engine.rng import named_stream

# What an arrival plug-in is: (specification, seed) -> requests in order of arrival.
ArrivalProcess = Callable[[WorkloadSpec, int], tuple[Request, ...]]


def resolve_requests(spec: WorkloadSpec, seed: int) -> tuple[Request, ...]:
    """Return the requests of a workload in order of arrival, cut to its token limit.

    Raises:
        UnknownPluginError: no arrival process of that name.
        InvalidRequestError: lengths, options or the trace cannot be used.

    """
    processes = scan_modules("foretoken.simulator.serving.arrivals", "ARRIVAL")
    process: ArrivalProcess = UnknownPluginError.look_up(spec.arrival, processes)
    return tuple(_cut(request, spec.max_tokens_per_request) for request in process(spec, seed))


def with_lengths(arrival_s: Sequence[float], spec: WorkloadSpec, seed: int) -> tuple[Request, ...]:
    """Return requests at these times with lengths drawn as the workload says."""
    num_requests = len(arrival_s)
    prefill = _draw_lengths(spec.prefill, num_requests, named_stream(seed, "prefill"), "prefill")
    decode = _draw_lengths(spec.decode, num_requests, named_stream(seed, "decode"), "decode")
    return tuple(
        Request(arrival_s=time_s, num_prefill_tokens=num_prefill, num_decode_tokens=num_decode)
        for time_s, num_prefill, num_decode in zip(arrival_s, prefill, decode, strict=True)
    )


def check_options(spec: WorkloadSpec, known: Sequence[str]) -> None:
    """Check that the arrival process has all options it was given.

    Raises:
        InvalidRequestError: one violation for the first unknown option.

    """
    for name in spec.arrival_options:
        if name not in known:
            choices = ", ".join(known) or "none"
            raise InvalidRequestError.of_field(
                f"workload.arrival_options.{name}", f"{spec.arrival} knows these options: {choices}"
            )


def _draw_lengths(
    spec: LengthSpec, num_requests: int, stream: np.random.Generator, name: str
) -> list[int]:
    field = f"workload.{name}"
    if spec.kind == "fixed":
        if spec.mean < 1:
            raise InvalidRequestError.of_field(f"{field}.mean", "must be at least 1")
        return [spec.mean] * num_requests
    if spec.kind == "uniform":
        if not 1 <= spec.minimum <= spec.maximum:
            raise InvalidRequestError.of_field(
                field, f"needs 1 <= minimum <= maximum, found {spec.minimum} and {spec.maximum}"
            )
        lengths: list[int] = stream.integers(
            spec.minimum, spec.maximum, num_requests, endpoint=True
        ).tolist()
        return lengths
    raise InvalidRequestError.of_field(f"{field}.kind", f"{spec.kind!r} is not fixed or uniform")


def _cut(request: Request, max_tokens: int) -> Request:
    excess = request.num_prefill_tokens + request.num_decode_tokens - max_tokens
    if max_tokens == 0 or excess <= 0:
        return request
    # The prompt gives way first: the answer is what the user waits for.
    num_prefill = max(1, request.num_prefill_tokens - excess)
    num_decode = max(1, min(request.num_decode_tokens, max_tokens - num_prefill))
    return replace(request, num_prefill_tokens=num_prefill, num_decode_tokens=num_decode)
