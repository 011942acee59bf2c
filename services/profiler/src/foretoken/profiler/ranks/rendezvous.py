"""Where the nodes of a group of ranks meet, by settings or as torchrun says.

This module needs no torch, so that what only configures a rendezvous does not either.
"""

import contextlib
import dataclasses
import fcntl
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from foretoken.domain.errors import FieldViolation, InvalidRequestError, find_violations, positive

LOOPBACK = "lo"

# All of them are in the environment of a process that torchrun started.
# Source: torch.distributed.run, "Environment Variables".
_TORCHRUN_NAMES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
)
_MAX_PORT = 65_535
# Request of an interface's address, and where that is in the answer. Source: netdevice(7).
_SIOCGIFADDR = 0x8915
_ADDRESS_BYTES = slice(20, 24)
# Any port: connecting a datagram socket sends nothing.
_DISCARD_PORT = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class RendezvousSpec:
    """How nodes (machines or pods) that time collectives together meet.

    `endpoint` is `host:port` of node 0, the same on all nodes; node 0 serves there, makes the plan
    and records. Node `node_rank` of `num_nodes` waits up to `wait_s` for the others; one that has
    come and is silent for `silent_s` is gone. Ranks talk over the network `interface` (empty: the
    one that leads to the endpoint).

    `is_served`: another process, torchrun's agent, serves at the endpoint. `prefix` keeps the keys
    of several rendezvous there apart. `local_rank` above 0 is a process with nothing to do, as one
    process of a node starts all its ranks; `num_local_ranks` limits how many (0: does not).
    """

    endpoint: str = ""
    num_nodes: int = 1
    node_rank: int = 0
    interface: str = ""
    wait_s: float = 600.0
    silent_s: float = 20.0
    is_served: bool = False
    prefix: str = "foretoken"
    local_rank: int = 0
    num_local_ranks: int = 0

    def __post_init__(self) -> None:
        """Check that nodes can meet."""
        violations = []
        if self.num_nodes < 1:
            violations.append(FieldViolation("num_nodes", "must be at least 1"))
        elif not 0 <= self.node_rank < self.num_nodes:
            violations.append(
                FieldViolation("node_rank", f"must be from 0 to {self.num_nodes - 1}")
            )
        if self.num_nodes > 1 and not self.endpoint:
            violations.append(FieldViolation("endpoint", "several nodes need host:port of node 0"))
        if self.endpoint and not _is_endpoint(self.endpoint):
            violations.append(FieldViolation("endpoint", f"{self.endpoint!r} is not host:port"))
        violations += find_violations(positive(self, "wait_s", "silent_s"))
        if violations:
            raise InvalidRequestError.of_violations(violations, "rendezvous")

    @property
    def is_leader(self) -> bool:
        """Whether this process makes the plan and records."""
        return self.node_rank == 0 and self.local_rank == 0

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the endpoint."""
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), int(port)


def find_rendezvous(spec: RendezvousSpec, environment: Mapping[str, str]) -> RendezvousSpec:
    """Return the settings, or where they name no endpoint, those of torchrun if it started us.

    Raises:
        InvalidRequestError: torchrun's variables contradict each other.

    """
    if spec.endpoint or not all(environment.get(name) for name in _TORCHRUN_NAMES):
        return spec
    numbers = {name: _number_in(environment, name) for name in _TORCHRUN_NAMES[1:]}
    per_node = numbers["LOCAL_WORLD_SIZE"]
    if per_node < 1 or numbers["WORLD_SIZE"] % per_node:
        raise InvalidRequestError.of_field(
            "rendezvous", "torchrun must start the same number of processes on every node"
        )
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dataclasses.replace(
        spec,
        endpoint=f"{environment['MASTER_ADDR']}:{numbers['MASTER_PORT']}",
        num_nodes=numbers["WORLD_SIZE"] // per_node,
        node_rank=numbers["GROUP_RANK"],
        is_served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        prefix=f"{spec.prefix}-{attempt}",
        local_rank=numbers["LOCAL_RANK"],
        num_local_ranks=per_node,
    )


def choose_interface(spec: RendezvousSpec) -> str:
    """Return the network interface for the ranks of this node; empty where it cannot be determined.

    One node needs the loopback interface alone: names of pods and laptops do not always resolve.
    """
    if spec.interface:
        return spec.interface
    if spec.num_nodes == 1:
        return LOOPBACK if LOOPBACK in _interfaces() else ""
    host, _ = spec.address
    return find_interface(host)


def find_interface(host: str) -> str:
    """Return the network interface whose IPv4 address this machine uses towards a host."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _DISCARD_PORT))
        own = probe.getsockname()[0]
        for name in _interfaces():
            if _address_of(name, probe) == own:
                return name
        # All of 127.0.0.0/8 is the loopback interface's.
        return LOOPBACK if own.startswith("127.") and LOOPBACK in _interfaces() else ""
    return ""


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _address_of(interface: str, probe: socket.socket) -> str:
    request = struct.pack("256s", interface.encode()[:15])
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:
        return ""
    return socket.inet_ntoa(answer[_ADDRESS_BYTES])


def _is_endpoint(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) <= _MAX_PORT


def _number_in(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise InvalidRequestError.of_field("rendezvous", f"{name}={text!r} is no number")
    return int(text)
