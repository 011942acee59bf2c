"""Rows of collectives and of what runs with them, and of what their times depend on."""

import dataclasses
import logging
import os
from collections.abc import Generator, Iterable, Mapping, Sequence

import torch
from torch import distributed

from foretoken.domain.errors import ForetokenError
from foretoken.domain.measurements.estimate import OperatorCall
from foretoken.domain.operators.spec.operator import find_operator
from foretoken.domain.operators.spec.overlap import group_of_call, plain_call
from foretoken.profiler.kernel import kernel_of_call
from foretoken.profiler.local_device import LocalDevice
from foretoken.profiler.ranks.group import CollectiveGroup
from foretoken.profiler.ranks.group_spec import (
    CollectiveTimingError,
    GroupLostError,
    GroupSpec,
    ranks_of_group,
)
from foretoken.profiler.ranks.rendezvous import RendezvousSpec
from foretoken.profiler.ranks.rendezvous_store import Notify
from foretoken.profiler.recording.batches import RowBuilder
from foretoken.profiler.recording.spool import Row
from foretoken.profiler.timing.nvml import open_nvml
from foretoken.profiler.timing.timer import TimingSummary

# Variables that choose algorithms, protocols, interfaces or how ranks reach each other.
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_")


def describe_links(
    device: LocalDevice, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return what the times of collectives on a device depend on, as short strings.

    `environment` are the variables to look at (none: this process's own).
    """
    variables = os.environ if environment is None else environment
    described = {
        name.lower(): value
        for name, value in sorted(variables.items())
        if name.startswith(_PREFIXES)
    }
    if not device.is_cuda:
        return {"collective_library": "gloo", **described}
    if distributed.is_nccl_available():
        version = torch.cuda.nccl.version()
        described["nccl"] = ".".join(str(part) for part in version if part != "")
    return {
        "collective_library": "nccl",
        "peer_access": _describe_peer_access(torch.cuda.device_count()),
        "nvlinks_per_device": _count_nvlinks(device),
        **described,
    }


def _describe_peer_access(num_devices: int) -> str:
    """Return which pairs of devices can read each other's memory."""
    pairs = [
        (first, second)
        for first in range(num_devices)
        for second in range(num_devices)
        if first != second
    ]
    able = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    if len(able) in (0, len(pairs)):
        return "all" if able else "none"
    return " ".join(f"{first}-{second}" for first, second in able)


def _count_nvlinks(device: LocalDevice) -> str:
    """Return how many NVLinks of a device are active; empty where the driver does not tell."""
    nvml = open_nvml(device.torch_device)
    count = nvml.nvlink_count() if nvml else None
    return "" if count is None else str(count)


_log = logging.getLogger(__name__)

# Ranks wait for each other, so their times scatter more and need more samples.
_PATIENCE_RATIO = 3.0
# A group that is lost again and again is not worth the time it takes to start.
_MAX_OPENINGS = 4


def in_group_order(calls: Iterable[OperatorCall]) -> tuple[OperatorCall, ...]:
    """Return calls in the order of `time_collectives`: one group after the other.

    Calls of a group keep their order; those that name no group come last.
    """
    return tuple(sorted(calls, key=_group_key))


def time_collectives(
    calls: Sequence[OperatorCall],
    spec: GroupSpec,
    rows: RowBuilder,
    topology: str = "",
    notify: Notify = _log.info,
) -> Generator[Row]:
    """Yield a row for each call, in group order; a call that cannot be timed gives a failed row.

    A group of which a rank died is started anew and goes on with the next call, a few times; where
    another node does not come back, with the calls that need this node alone. Without calls the
    other nodes are only let go. Closing the generator ends all processes.
    """
    timer = spec.timer
    patient = dataclasses.replace(timer, case_s_max=timer.case_s_max * _PATIENCE_RATIO)
    runner = _Runner(dataclasses.replace(spec, timer=patient), notify)
    try:
        if not calls and spec.rendezvous.num_nodes > 1:
            runner.open()
        for call in in_group_order(calls):
            kernel = _kernel_of(call, spec)
            outcome = runner.time(call)
            if isinstance(outcome, TimingSummary):
                yield rows.measured(call, kernel, outcome, topology=topology)
            else:
                yield rows.failed(call, kernel, str(outcome), topology=topology)
    finally:
        runner.close()


class _Runner:
    """Times calls in a group that it starts anew after a loss."""

    def __init__(self, spec: GroupSpec, notify: Notify) -> None:
        self._spec = spec
        self._notify = notify
        self._group = CollectiveGroup(spec)
        self._num_openings = 0
        self._is_open = False
        self._reason = ""

    def open(self) -> None:
        """Start the group; where the other nodes fail, this one alone."""
        if self._num_openings >= _MAX_OPENINGS:
            raise GroupLostError(f"lost {self._num_openings} times, the last time: {self._reason}")
        self._num_openings += 1
        try:
            self._group.open(self._notify)
        except GroupLostError as err:
            self._reason = str(err)
            self._leave_others(err)
            self._group.open(self._notify)
        self._is_open = True

    def time(self, call: OperatorCall) -> TimingSummary | CollectiveTimingError:
        """Return the time of a call, or why there is none."""
        try:
            # Asked first: nobody waits for a node that no call needs.
            self._check_group(call)
            if not self._is_open:
                self.open()
            self._check_group(call)
            return self._group.time(call)
        except GroupLostError as err:
            _log.warning("group of %d ranks: %s", self._spec.world_size, err)
            self._is_open = False
            self._reason = str(err)
            return err
        except CollectiveTimingError as err:
            return err
        except ForetokenError as err:
            return CollectiveTimingError(f"{type(err).__name__}: {err}")

    def close(self) -> None:
        """End all ranks and let other nodes go."""
        self._group.close()

    def _check_group(self, call: OperatorCall) -> None:
        """Check that the call's ranks are here.

        Raises:
            CollectiveTimingError: they are not, and why nodes are missing.

        """
        try:
            ranks_of_group(*group_of_call(call), self._spec)
        except CollectiveTimingError as err:
            if not self._reason:
                raise
            raise CollectiveTimingError(f"{err}: {self._reason}") from err

    def _leave_others(self, err: GroupLostError) -> None:
        """Go on with this node alone.

        Raises:
            GroupLostError: there is no other node to leave.

        """
        if self._spec.rendezvous.num_nodes == 1:
            raise err
        _log.warning("going on without the other nodes: %s", err)
        self._group.close()
        self._spec = dataclasses.replace(self._spec, rendezvous=RendezvousSpec())
        self._group = CollectiveGroup(self._spec)


def _kernel_of(call: OperatorCall, spec: GroupSpec) -> str:
    if find_operator(call.operator).is_collective:
        return f"torch.distributed({spec.backend})"
    try:
        return kernel_of_call(
            plain_call(call), torch.device("cuda" if spec.is_cuda else "cpu")
        ).source
    except ForetokenError:
        return ""


def _group_key(call: OperatorCall) -> tuple[int, int, int]:
    try:
        devices_per_node, num_nodes = group_of_call(call)
    except ForetokenError:
        return 1, 0, 0
    return 0, num_nodes, devices_per_node
