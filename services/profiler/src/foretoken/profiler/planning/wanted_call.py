"""The calls that a request covers, each with the kernel that is to run it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.hardware.device import DeviceSpec
from foretoken.domain.measurements.estimate import DType, OperatorCall, Phase
from foretoken.domain.measurements.profiling import ProfileRequest
from foretoken.domain.operators.spec.operator import OperatorSpec, all_operators, find_operator
from foretoken.domain.operators.spec.overlap import is_group_call
from foretoken.domain.operators.spec.variant import format_variant, parse_variant
from foretoken.profiler.kernel import Kernel, all_kernels, find_kernels
from foretoken.profiler.local_device import CPU
from foretoken.profiler.planning.model_sweep import FULL_GRID, QUICK_GRID, ModelSweep, collect_calls

# A group of one rank has no links to time.
_FEWEST_RANKS = 2
_WARM = {"cache": "warm"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSite:
    """Where calls are to be timed: a device, how torch addresses it, ranks of a node, and nodes.

    A device that is not here (`is_present`) is planned for with every kernel there is a file for.
    """

    device: DeviceSpec
    torch_device: torch.device
    num_ranks: int = 1
    num_nodes: int = 1
    is_present: bool = True

    def kernels(self, operator: str, dtype: DType, phase: Phase) -> tuple[Kernel, ...]:
        """Return the kernels that run an operator, the default first."""
        if self.is_present:
            return find_kernels(operator, dtype, phase, self.torch_device)
        kernel = all_kernels().get(operator)
        return tuple(
            member
            for member in (kernel.members if kernel else ())
            if dtype in member.dtypes and (phase is Phase.FORWARD or member.differentiable)
        )


def sweep_dtypes(device: str, quick: bool) -> tuple[DType, ...]:
    """Return the number formats worth timing on a device.

    A quick sweep takes one: fp32 on CPUs, as half precision is slow on those without matrix units
    for it and its rounding says little about other machines; bf16 on GPUs, where models run.
    """
    if device == CPU:
        return (DType.FP32,) if quick else (DType.FP32, DType.BF16)
    return (DType.BF16,) if quick else (DType.BF16, DType.FP16)


def check_operators(names: Sequence[str], num_ranks: int) -> None:
    """Check that operators asked for by name can be timed here.

    Raises:
        UnknownOperatorError: one does not exist.
        InvalidRequestError: no kernel runs one, or a collective has no second rank.

    """
    for name in names:
        spec = find_operator(name)
        if spec.is_collective and num_ranks < _FEWEST_RANKS:
            raise InvalidRequestError.of_field(
                "operators", f"{name} needs at least two devices on this machine"
            )
        if not spec.is_collective and name not in all_kernels():
            raise InvalidRequestError.of_field("operators", f"no kernel runs {name} here")


def wanted_calls(
    request: ProfileRequest, site: PlanSite
) -> tuple[list[OperatorCall], Counter[str]]:
    """Return the calls, each once with its kernel, and what was left out by reason.

    Those of `request.calls`, else those its models ask for, else every operator's sweep.

    Raises:
        UnknownOperatorError: the request names an operator that does not exist.
        InvalidRequestError: it names one that cannot be timed here, or no model can be cut so.

    """
    check_operators(request.operators, site.num_ranks * site.num_nodes)
    is_sweep = not request.calls and not request.models
    left_out: Counter[str] = Counter()
    resolver = _Resolver(site, request.kernels == "all", is_sweep, left_out)
    calls = _asked(request, site, left_out)
    if request.operators:
        calls = [call for call in calls if call.operator in request.operators]
    found: dict[tuple[object, ...], OperatorCall] = {}
    for call in calls:
        for resolved in resolver.resolve(call):
            for kept in _in_cache_states(resolved, request.cache):
                found.setdefault(_key(kept), kept)
    return list(found.values()), left_out


def _asked(
    request: ProfileRequest, site: PlanSite, left_out: Counter[str]
) -> Sequence[OperatorCall]:
    if request.calls:
        for call in request.calls:
            find_operator(call.operator).check_call(call.dims)
        return request.calls
    if not request.models:
        return list(_sweep_calls(request, site))
    # Models run in the format that a quick sweep takes.
    sweep = ModelSweep(
        models=request.models,
        tp_sizes=request.tp_sizes,
        dtypes=request.dtypes or sweep_dtypes(site.device.name, quick=True),
        grid=QUICK_GRID if request.quick else FULL_GRID,
        has_training=request.has_training,
    )
    found = collect_calls(sweep)
    left_out.update(found.left_out)
    return list(found.calls.values())


def _sweep_calls(request: ProfileRequest, site: PlanSite) -> Iterator[OperatorCall]:
    for spec in all_operators().values():
        if request.operators and spec.name not in request.operators:
            continue
        if spec.is_collective and site.num_ranks * site.num_nodes < _FEWEST_RANKS:
            continue
        for dtype in request.dtypes or sweep_dtypes(site.device.name, request.quick):
            phases = _phases(spec, dtype, site)
            for dims in _unique(spec.sweep(request.quick)):
                for phase in phases:
                    yield OperatorCall(operator=spec.name, dtype=dtype, phase=phase, dims=dims)


def _phases(spec: OperatorSpec, dtype: DType, site: PlanSite) -> tuple[Phase, ...]:
    """Return the phases that a sweep takes: those a kernel runs."""
    if spec.is_collective:
        return (Phase.FORWARD,)
    return tuple(phase for phase in Phase if site.kernels(spec.name, dtype, phase))


def _unique(sweep: Iterable[Mapping[str, int]]) -> list[Mapping[str, int]]:
    return list({tuple(sorted(dims.items())): dims for dims in sweep}.values())


class _Resolver:
    """Finds the kernels that run a call, and counts by reason what none runs."""

    def __init__(
        self, site: PlanSite, takes_all: bool, is_sweep: bool, left_out: Counter[str]
    ) -> None:
        self._site, self._takes_all, self._is_sweep = site, takes_all, is_sweep
        self._left_out = left_out

    def resolve(self, call: OperatorCall) -> Iterator[OperatorCall]:
        """Yield the call with each kernel to time; a backward pass nothing runs as its parts."""
        spec = find_operator(call.operator)
        if is_group_call(call):
            yield from self._resolve_group(call)
            return
        kernels = self._chosen(call)
        if not kernels and call.phase is Phase.BACKWARD and spec.backward_calls is not None:
            for dims in spec.backward_calls(call.dims):
                yield from self.resolve(replace(call, phase=Phase.FORWARD, dims=dims))
            return
        if not kernels:
            self._left_out[_no_kernel(call)] += 1
        for kernel in kernels:
            variant = kernel.variant if self._is_sweep else call.variant
            yield replace(call, kernel=kernel.source, variant=variant)

    def _resolve_group(self, call: OperatorCall) -> Iterator[OperatorCall]:
        num_ranks, num_nodes = call.dims.get("devices_per_node", 1), call.dims.get("num_nodes", 1)
        if num_ranks <= self._site.num_ranks and num_nodes <= self._site.num_nodes:
            yield call
        elif not self._is_sweep:
            where = f" on each of {num_nodes} nodes" if num_nodes > 1 else " of one node"
            self._left_out[f"{call.operator}: needs {num_ranks} devices{where}"] += 1

    def _chosen(self, call: OperatorCall) -> list[Kernel]:
        kernels = [
            kernel
            for kernel in self._site.kernels(call.operator, call.dtype, call.phase)
            if kernel.can_run(call.dims)
        ]
        if self._is_sweep:
            if self._takes_all:
                return kernels
            # Where there is no plain case, each special one has a default.
            plain = [kernel for kernel in kernels if not kernel.variant]
            return plain[:1] or list({k.variant: k for k in reversed(kernels)}.values())
        fitting = [
            kernel
            for kernel in kernels
            if kernel.variant == _without_warm(call.variant) and call.kernel in ("", kernel.source)
        ]
        return fitting if self._takes_all else fitting[:1]


def _without_warm(variant: str) -> str:
    facts = {k: v for k, v in parse_variant(variant).items() if k not in _WARM}
    return format_variant(facts) or ""


def _in_cache_states(call: OperatorCall, cache: str) -> Iterator[OperatorCall]:
    is_group = is_group_call(call)
    if cache in ("cold", "both") or is_group:
        yield call
    if cache in ("warm", "both") and not is_group:
        facts = {**parse_variant(call.variant), **_WARM}
        yield replace(call, variant=format_variant(facts) or "")


def _key(call: OperatorCall) -> tuple[object, ...]:
    dims = tuple(sorted(call.dims.items()))
    return call.operator, call.dtype, call.phase, call.variant, call.kernel, dims


def _no_kernel(call: OperatorCall) -> str:
    words = (call.dtype.name.lower(), call.phase.name.lower(), call.variant, call.kernel)
    what = " ".join(word for word in words if word)
    return f"{call.operator} ({what}): no kernel runs it here"
