"""Shell scripts that start training: options as arrays, one a line, and how they are read back."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.domain.errors import InvalidRequestError
from foretoken.simulator.launch.documented_option import OptionList, find_options
from foretoken.simulator.launch.option_map import group_words, split_words
from foretoken.simulator.launch.trainer import TrainingJob

MASTER_PORT = 29500
# Names of the arrays in the script.
ARGUMENTS = "ARGUMENTS"
LAUNCHER = "LAUNCHER"
# What is read of a script beside its options.
NUM_DEVICES = "num-devices"

# What a script on one node, and on several, says first, and where its processes meet.
_FEW = ("# Run this on one node.", 'MASTER_ADDR="${MASTER_ADDR:-localhost}"')
_MANY = (
    "# Run this on each of {} nodes: the same MASTER_ADDR, and NODE_RANK 0, 1, ...",
    'MASTER_ADDR="${MASTER_ADDR:?set it to the address of the first node}"',
)
_PLACE = '--node-rank "${NODE_RANK}" --master-addr "${MASTER_ADDR}"'

Options = Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What torchrun starts: `target` is a path or `-m` and a module, in shell words.

    `lines` of shell come before: variables, and what fetches the program. `data_lines` set the
    array `DATA`, whose words come after the arguments.
    """

    title: str
    target: str
    lines: Sequence[str] = ()
    data_lines: Sequence[str] = ("DATA=()",)


def render_script(job: TrainingJob, program: Program, options: Options, known: OptionList) -> str:
    """Return the script that starts a node's part of a run.

    Raises:
        InvalidRequestError: an option is not documented.

    """
    known.check(options)
    launcher = {
        "nnodes": job.num_nodes,
        "nproc-per-node": job.devices_per_node,
    }
    find_options("torchrun").check(launcher)
    heading, address = _FEW if job.num_nodes == 1 else _MANY
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {program.title}",
            heading.format(job.num_nodes),
            "# Words after the script's name are added to the arguments.",
            "set -euo pipefail",
            'cd "$(dirname "${BASH_SOURCE[0]}")"',
            "",
            address,
            'NODE_RANK="${NODE_RANK:-${JOB_COMPLETION_INDEX:-0}}"',
            *program.lines,
            "",
            *_array(LAUNCHER, launcher),
            f"{LAUNCHER}+=({_PLACE} --master-port {MASTER_PORT})",
            "",
            *_array(ARGUMENTS, options),
            *program.data_lines,
            "",
            f'exec torchrun "${{{LAUNCHER}[@]}}" {program.target} \\',
            f'    "${{{ARGUMENTS}[@]}}" "${{DATA[@]}}" "$@"',
            "",
        ]
    )


def read_script(script: str) -> dict[str, Any]:
    """Return the program's options and how many processes are started, as `NUM_DEVICES`.

    Read from a script that was written here, or from a command: `torchrun ... program.py ...`.

    Raises:
        InvalidRequestError: it is neither, or a quotation is not closed.

    """
    if f"\n{ARGUMENTS}=(" in script:
        launcher, options = read_array(script, LAUNCHER), read_array(script, ARGUMENTS)
    else:
        words = split_words(script)
        starts = [place for place, word in enumerate(words) if word.endswith(".py")]
        if not starts:
            raise InvalidRequestError.of_field("command", "starts no program: `torchrun x.py ...`")
        launcher = group_words(words[: starts[0]])[1]
        options = group_words(words[starts[0] + 1 :])[1]
    per_node = launcher.get("nproc-per-node", 1)
    return {**options, NUM_DEVICES: int(launcher.get("nnodes", 1)) * int(per_node)}


def read_array(script: str, name: str) -> dict[str, Any]:
    """Return the options of an array in a script.

    Raises:
        InvalidRequestError: the script has no such array.

    """
    found = re.search(rf"^{name}=\(\n(.*?)^\)$", script, re.DOTALL | re.MULTILINE)
    if found is None:
        raise InvalidRequestError.of_field(name, "the script has no such array")
    return group_words(split_words(found[1]))[1]


def _array(name: str, options: Options) -> list[str]:
    lines = [f"{name}=("]
    for option, value in options.items():
        if value is None or value is False:
            continue
        words = [] if value is True else list(value) if isinstance(value, tuple) else [value]
        quoted = (shlex.quote(str(word)) for word in words)
        lines.append("    " + " ".join((f"--{option}", *quoted)))
    return [*lines, ")"]
