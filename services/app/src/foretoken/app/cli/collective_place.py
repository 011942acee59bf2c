"""Which of the nodes that time collectives together this process is, and serving as one."""

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretoken.app.cli.state import note, show_progress
from foretoken.app.config import EMBEDDED, AppConfig, process_environment
from foretoken.domain import schema
from foretoken.jobs.runner import JobProgress

if TYPE_CHECKING:
    from foretoken.profiler.ranks.rendezvous import RendezvousSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This process among the nodes; without a rendezvous it is the only one."""

    rendezvous: "RendezvousSpec | None" = None

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return self.rendezvous.num_nodes if self.rendezvous else 1

    @property
    def is_leader(self) -> bool:
        """Whether this process plans and records."""
        return self.rendezvous is None or self.rendezvous.is_leader


def find_place(config: AppConfig) -> Place:
    """Return this process's place by its settings, or as torchrun says.

    Where another process profiles, nobody meets here.

    Raises:
        InvalidRequestError: a setting is wrong.

    """
    if config.endpoints.profiler != EMBEDDED:
        return Place()
    from foretoken.profiler.ranks.rendezvous import RendezvousSpec, find_rendezvous

    given = config.profiler.get("rendezvous") or {}
    spec = schema.decode(RendezvousSpec, given, "profiler.rendezvous")
    return Place(rendezvous=find_rendezvous(spec, process_environment()))


def serve_place(place: Place, device: str, num_cpu_ranks: int) -> None:
    """Lend this node's devices to node 0 until it lets go; no catalog is opened.

    A CPU lends `num_cpu_ranks` processes.

    Raises:
        DeviceNotPresentError: this machine has no such device.
        ForetokenError: node 0 did not come, or is gone.

    """
    spec = place.rendezvous
    if spec is None or spec.local_rank > 0:
        # Another process of this node starts all its ranks.
        return
    from foretoken.profiler.local_device import find_local_device
    from foretoken.profiler.ranks.node import serve_node

    found = find_local_device(device)
    present = found.num_present if found.is_cuda else num_cpu_ranks
    num_ranks = spec.num_local_ranks or present
    with show_progress(f"node {spec.node_rank} of {spec.num_nodes}, for {spec.endpoint}") as update:
        progress = JobProgress(update.set, threading.Event())
        num_timed = serve_node(spec, num_ranks=num_ranks, is_cuda=found.is_cuda, progress=progress)
    note(f"node {spec.node_rank}: {num_timed} calls timed; node 0 records and shows them")
