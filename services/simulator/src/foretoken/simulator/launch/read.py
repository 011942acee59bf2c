"""Scenarios of the commands and files that start something: what `write` and its like write."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.domain.errors import InvalidRequestError
from foretoken.simulator.launch.served_options import scenario_content
from foretoken.simulator.launch.write import all_servers


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadLaunch:
    """What a command starts: the content of a scenario file, which names no device.

    `framework` is what it starts it with, `unread` are options that a scenario has nothing for.
    """

    framework: str
    content: Mapping[str, Any]
    unread: tuple[str, ...] = ()


def read_serving_command(command: str) -> ReadLaunch:
    """Return what the command of a server says, by the rules of the engine's newest profile.

    Raises:
        InvalidRequestError: it starts no server that files are written for.

    """
    servers = all_servers()
    for server in servers.values():
        found = server.read(command)
        if found is None:
            continue
        fields, unread = found
        role = fields.get("role", "aggregated")
        if role != "aggregated":
            raise InvalidRequestError.of_field(
                "command",
                f"starts the {role} pool of a deployment; read the command of each pool without its"
                " transfer of KV caches, and join them under `cluster`",
            )
        content = scenario_content(fields, server.profile)
        return ReadLaunch(framework=server.name, content=content, unread=tuple(unread))
    raise InvalidRequestError.of_field(
        "command", f"starts none of {', '.join(sorted(servers))}: expected as in `vllm serve MODEL`"
    )
