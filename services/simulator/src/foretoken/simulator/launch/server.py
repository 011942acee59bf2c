"""How a server is started: the contract of `engines/`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foretoken.domain.frameworks.engine_capability import EngineCapabilities
from foretoken.domain.requests.cluster import ReplicaPool
from foretoken.domain.requests.scenario import ServingScenario
from foretoken.simulator.launch.option_map import Fields, OptionMap

# Where servers and routers listen.
SERVER_PORT = 8000
# Weights of large models take many minutes to load; a router waits so long for its servers.
STARTUP_S = 3600
# The environment variable whose value is the address of the pod.
POD_ADDRESS = "POD_ADDRESS"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPool:
    """Replicas that are started alike: `scenario` is that of one of them, without a cluster.

    `model_id` is what the server loads: a name on Hugging Face, or a path. No request is longer
    than `max_tokens`, prompt and answer.
    """

    pool: ReplicaPool
    scenario: ServingScenario
    model_id: str
    max_tokens: int

    @property
    def num_devices(self) -> int:
        """Devices of a replica."""
        return self.scenario.layout.num_devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A command, what it needs around it, and what its reader has to know.

    `variables` are environment variables; `{POD_ADDRESS}` in them stands for the pod's address.
    """

    command: Sequence[str]
    image: str
    variables: Mapping[str, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()


class ServingEngine(Protocol):
    """What a module of `engines/` offers as its `ENGINE`."""

    @property
    def name(self) -> str:
        """Name of the engine, as profiles have it and as `foretoken collect --server` takes it."""

    @property
    def can(self) -> EngineCapabilities:
        """What the newest release that files are written for can do."""

    @property
    def profile(self) -> str:
        """Engine profile of the newest release that files are written for."""

    @property
    def options(self) -> OptionMap:
        """The options of the server."""

    def read(self, command: str) -> tuple[Fields, list[str]] | None:
        """Return the fields of `ServedOptions` that a command says, and options that say none.

        None where the command starts something else.
        """

    def serve(self, pool: LaunchPool) -> Launch:
        """Return what starts one replica of a pool.

        Raises:
            InvalidRequestError: the engine cannot do what the scenario says.

        """

    def route(self, urls_by_role: Mapping[str, Sequence[str]], router: str) -> Launch:
        """Return what starts the router before servers at these addresses, by role of their pool.

        Raises:
            InvalidRequestError: the engine's router has no such policy.

        """


def text_arguments(options: Mapping[str, object]) -> list[str]:
    """Return options as arguments: `True` is the bare option, `None` and `False` leave it out."""
    arguments: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        arguments.append(f"--{name}")
        if value is not True:
            arguments.append(str(value))
    return arguments
