"""What to search for, as the options of `foretoken search training` say it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.app.cli.call_words import parse_values
from foretoken.app.cli.search_options import check_prices, device_names, parse_prices
from foretoken.app.cli.state import note, parse_assignments, scenario_changes
from foretoken.app.cli.training_axes import AXES, SEARCHED_AXES, parse_axes
from foretoken.app.scenario_file import (
    build_training_scenario,
    read_search_request,
    read_searched_scenario,
)
from foretoken.domain import schema
from foretoken.domain.dataset import find_dataset
from foretoken.domain.errors import FieldViolation, InvalidRequestError
from foretoken.domain.plugins import read_yaml
from foretoken.domain.price import load_price_list
from foretoken.domain.scenario import TrainingScenario
from foretoken.domain.training_search import (
    PARTITIONS,
    TRAINING_OBJECTIVES,
    TrainingSearchRequest,
    TrainingSpace,
)

# The parts of the command's help.
_ASKED, _CLUSTER = "What is trained", "What it runs on"
_SPACE, _EFFORT = "What may vary", "What ranks, and how much is computed"
# What a request cannot do without: the option, what a scenario has instead, and an example.
_NEEDED = {
    "model": ("--model", "names model", "llama-2-7b"),
    "device": ("--device", "names device", "h100_sxm"),
    "layout": ("--gpus", "has a layout", "64"),
    "global_batch_size": ("--global-batch-tokens", "names global_batch_size", "4194304"),
}
# `2x8`: two nodes of eight devices.
_NODES = re.compile(r"(\d+)(?:x(\d+))?")


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """What is to be trained. Options change what the scenario file says."""

    model: Annotated[
        str,
        typer.Option(
            help="Model: a preset (`foretoken list models`) or the path of a Hugging Face"
            " `config.json`.",
            rich_help_panel=_ASKED,
        ),
    ] = ""
    global_batch_tokens: Annotated[
        str,
        typer.Option(
            help="Tokens of a step, several with commas: `4194304`. A multiple of the sequence"
            " length.",
            rich_help_panel=_ASKED,
        ),
    ] = ""
    global_batch: Annotated[
        str,
        typer.Option(
            help="The same in samples: `1024`, `512,1024`. Default: the scenario's.",
            rich_help_panel=_ASKED,
        ),
    ] = ""
    sequence_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Tokens of a sample (default: the scenario's, or 4096).",
            rich_help_panel=_ASKED,
        ),
    ] = None
    trainer: Annotated[
        str,
        typer.Option(
            help="The training framework: see `foretoken list trainers`.", rich_help_panel=_ASKED
        ),
    ] = ""
    tokens: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Also tell steps, days and cost of a run to so many tokens: `2e12`.",
            rich_help_panel=_ASKED,
        ),
    ] = 0.0
    dataset: Annotated[
        str,
        typer.Option(
            help="The same for a known dataset, once through (`foretoken list datasets`).",
            rich_help_panel=_ASKED,
        ),
    ] = ""
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change one key of the scenario that is not searched: `dtype=bf16`. Repeatable.",
            rich_help_panel=_ASKED,
        ),
    ] = None
    request: Annotated[
        Path | None,
        typer.Option(
            help="A whole request in a file (YAML or JSON), as a report shows it: `scenario`,"
            " `space` and the rest. Other options of what to search for are not read.",
            exists=True,
            dir_okay=False,
            rich_help_panel=_ASKED,
        ),
    ] = None

    @property
    def num_tokens(self) -> float:
        """Tokens of the whole run; 0 where none is asked for.

        Raises:
            InvalidRequestError: both options say so, or no such dataset.

        """
        if self.tokens and self.dataset:
            raise InvalidRequestError.of_field("--tokens", "says the same as --dataset: give one")
        return find_dataset(self.dataset).num_tokens if self.dataset else self.tokens


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What it is to run on."""

    devices: Annotated[
        str,
        typer.Option(
            "--devices",
            "--device",
            help="Devices to compare, several with commas: see `foretoken list devices`.",
            rich_help_panel=_CLUSTER,
        ),
    ] = ""
    gpus: Annotated[
        str,
        typer.Option(
            help="How many of them: `128`, or clusters to compare, `64,128` or `64:512` doubling."
            " Default: those of the scenario's layout.",
            rich_help_panel=_CLUSTER,
        ),
    ] = ""
    price: Annotated[
        list[str] | None,
        typer.Option(
            help="USD an hour of a device: `h100_sxm=2.5`. Repeatable.", rich_help_panel=_CLUSTER
        ),
    ] = None
    price_list: Annotated[
        str,
        typer.Option(
            help="Price devices by a list (`foretoken list prices`), or by a YAML file of yours.",
            rich_help_panel=_CLUSTER,
        ),
    ] = ""
    spot: Annotated[
        bool,
        typer.Option(
            "--spot", help="With --price-list: take the spot prices.", rich_help_panel=_CLUSTER
        ),
    ] = False
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            help="Nodes of one type in a cluster of several: `a100_sxm_80=4x8` is four nodes of"
            " eight. Repeatable; stages of the pipeline are placed on them.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None
    subsets: Annotated[
        bool,
        typer.Option(
            "--subsets",
            help="With --nodes: also compare clusters of fewer of these nodes.",
            rich_help_panel=_CLUSTER,
        ),
    ] = False
    partition: Annotated[
        str,
        typer.Option(
            help="With --nodes: how layers are cut to stages:"
            f" {', '.join(f'`{name}`' for name in PARTITIONS)}.",
            rich_help_panel=_CLUSTER,
        ),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class SpaceOptions:
    """What may vary. All that is sensible does, unless it is named here."""

    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="Try only these values of an axis, repeatable: `tp=1,2,4`, `micro_batch_size=1:8`,"
            f" `recompute=none,full`. Axes: {', '.join(AXES)}.",
            rich_help_panel=_SPACE,
        ),
    ] = None
    space: Annotated[
        Path | None,
        typer.Option(
            help="A file (YAML) of a space: lists by axis, as a request has them under `space`.",
            exists=True,
            dir_okay=False,
            rich_help_panel=_SPACE,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EffortOptions:
    """What ranks, and how much is computed."""

    objective: Annotated[
        str,
        typer.Option(
            help=f"What ranks: {', '.join(f'`{name}`' for name in TRAINING_OBJECTIVES)}.",
            rich_help_panel=_EFFORT,
        ),
    ] = TRAINING_OBJECTIVES[0]
    finalists: Annotated[
        int,
        typer.Option(
            min=0, help="How many of the best to simulate event by event.", rich_help_panel=_EFFORT
        ),
    ] = 5
    listed: Annotated[
        int,
        typer.Option(
            "--max-candidates",
            min=1,
            help="How many of those that fit are listed in the report and exported, best first.",
            rich_help_panel=_EFFORT,
        ),
    ] = 1000
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Also tell what is best, and how fast, with links 2x, memory bandwidth or capacity"
            " +50 %, arithmetic 2x, half and twice the batch.",
            rich_help_panel=_EFFORT,
        ),
    ] = False
    job: Annotated[
        str,
        typer.Option(
            help="Go on watching a search that was started before, instead of a new one.",
            rich_help_panel=_EFFORT,
        ),
    ] = ""


def build_training_request(
    scenario: Path | None,
    question: QuestionOptions,
    cluster: ClusterOptions,
    space: SpaceOptions,
    effort: EffortOptions,
) -> TrainingSearchRequest:
    """Return what the options ask for.

    Raises:
        InvalidRequestError: no model, device or batch, or a value that cannot be.

    """
    if question.request is not None:
        return read_search_request(question.request, TrainingSearchRequest, build_training_scenario)
    asked = _build_space(cluster, space)
    resolved = _resolve(scenario, question, asked)
    asked = replace(asked, usd_per_hour=_listed_prices(cluster, asked, resolved.device))
    if effort.objective == "cost":
        _check_priced(asked, resolved.device)
    sizes = _batch_sizes(question, resolved) or asked.global_batch_sizes
    if sizes:
        asked = replace(asked, global_batch_sizes=sizes)
        resolved = replace(resolved, global_batch_size=sizes[0])
    return TrainingSearchRequest(
        scenario=resolved,
        space=asked,
        objective=effort.objective,
        num_finalists=effort.finalists,
        max_candidates=effort.listed,
        has_sensitivity=effort.sensitivity,
    )


def _resolve(
    scenario: Path | None, question: QuestionOptions, space: TrainingSpace
) -> TrainingScenario:
    """Return the scenario: the file's, changed by options, or one of options alone."""
    content = read_searched_scenario(scenario)
    if not space.node_groups:
        _check_changes(question.change or [])
    overrides = _overrides(question, space)
    known = {*content, *overrides}
    if question.global_batch or question.global_batch_tokens or space.global_batch_sizes:
        known.add("global_batch_size")
    if scenario is not None or space.num_devices or space.node_groups:
        known.add("layout")
    lacking = [
        FieldViolation(option, f"is needed where no scenario {says}, as in {option} {example}")
        for key, (option, says, example) in _NEEDED.items()
        if key not in known
    ]
    if lacking:
        raise InvalidRequestError.of_violations(lacking)
    return build_training_scenario(content, overrides, scenario or Path("search.yaml"))


def _check_changes(words: Sequence[str]) -> None:
    """Refuse changes of what the search varies whatever the scenario says."""
    for name, value in parse_assignments(words).items():
        axis = name.removeprefix("layout.")
        if axis in SEARCHED_AXES:
            raise InvalidRequestError.of_field(
                f"--set {name}", f"is searched; to fix it: --vary {axis}={value}"
            )


def _overrides(question: QuestionOptions, space: TrainingSpace) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if question.model:
        overrides["model"] = question.model
    if space.devices:
        overrides["device"] = space.devices[0]
    elif space.node_groups:
        overrides["device"] = space.node_groups[0].device
    if question.sequence_length:
        overrides["sequence_length"] = question.sequence_length
    if question.trainer:
        overrides["trainer.profile"] = question.trainer
    return overrides | scenario_changes(question.change)


def _batch_sizes(question: QuestionOptions, scenario: TrainingScenario) -> tuple[int, ...]:
    """Return samples per step, of the option in samples or of that in tokens; none if neither."""
    if question.global_batch and question.global_batch_tokens:
        raise InvalidRequestError.of_field(
            "--global-batch", "says the same as --global-batch-tokens: give one"
        )
    if question.global_batch:
        return parse_values("--global-batch", question.global_batch)
    if not question.global_batch_tokens:
        return ()
    length = scenario.sequence_length
    tokens = parse_values("--global-batch-tokens", question.global_batch_tokens)
    if uneven := [count for count in tokens if count < length or count % length]:
        raise InvalidRequestError.of_field(
            "--global-batch-tokens",
            f"{uneven[0]:,} is no multiple of the sequence length, {length:,}: change it with"
            " --sequence-length",
        )
    return tuple(count // length for count in tokens)


def _build_space(cluster: ClusterOptions, space: SpaceOptions) -> TrainingSpace:
    devices, prices = device_names(cluster.devices), parse_prices(cluster.price or [])
    if numbers := [word for word in devices if word.isdigit()]:
        raise InvalidRequestError.of_field(
            "--devices", f"{numbers[0]} is no device; how many there are is --gpus {numbers[0]}"
        )
    groups = _node_groups(cluster)
    check_prices(prices, devices or [group["device"] for group in groups])
    said: dict[str, Any] = {
        **(read_yaml(space.space, "space") if space.space is not None else {}),
        **parse_axes(space.vary or []),
    }
    given = {
        "devices": devices,
        "num_devices": parse_values("--gpus", cluster.gpus) if cluster.gpus else (),
        "usd_per_hour": prices,
        "node_groups": groups,
        "has_subsets": cluster.subsets,
        "partition": cluster.partition,
    }
    said.update({name: value for name, value in given.items() if value})
    return schema.decode(TrainingSpace, said, "space")


def _listed_prices(
    cluster: ClusterOptions, space: TrainingSpace, device: str
) -> Mapping[str, float]:
    """Return the list's price of each device that is searched, where no other is given."""
    if not cluster.price_list:
        if cluster.spot:
            raise InvalidRequestError.of_field("--spot", "is of --price-list")
        return space.usd_per_hour
    prices = load_price_list(cluster.price_list)
    grouped = tuple(group.device for group in space.node_groups)
    listed = {}
    for name in dict.fromkeys(space.devices or grouped or (device,)):
        if name not in space.usd_per_hour:
            found = prices.find(name, is_spot=cluster.spot)
            listed[name] = found.pick(is_spot=cluster.spot)
            note(f"{name}: USD {listed[name]:g} an hour, {found.describe(is_spot=cluster.spot)}")
    return {**listed, **space.usd_per_hour}


def _check_priced(space: TrainingSpace, device: str) -> None:
    """Refuse to rank by cost what has no price, before a search is started.

    Raises:
        InvalidRequestError: a device has none.

    """
    grouped = [group.device for group in space.node_groups if not group.usd_per_hour]
    searched = grouped if space.node_groups else space.devices or (device,)
    unpriced = [name for name in dict.fromkeys(searched) if not space.usd_per_hour.get(name)]
    if unpriced:
        options = " ".join(f"--price {name}=USD" for name in unpriced)
        raise InvalidRequestError.of_field(
            "--objective", f"to rank by cost, say what an hour costs: {options}, or --price-list"
        )


def _node_groups(cluster: ClusterOptions) -> Sequence[Mapping[str, Any]]:
    groups = []
    for device, text in parse_assignments(cluster.nodes or []).items():
        matched = _NODES.fullmatch(text)
        if matched is None:
            raise InvalidRequestError.of_field(
                "--nodes", f"expected {device}=4x8, nodes times devices of each, got {text!r}"
            )
        groups.append(
            {
                "device": device,
                "num_nodes": int(matched[1]),
                "devices_per_node": int(matched[2] or 0),
            }
        )
    if groups and cluster.gpus:
        raise InvalidRequestError.of_field("--gpus", "--nodes says already how many there are")
    if (cluster.subsets or cluster.partition) and not groups:
        raise InvalidRequestError.of_field("--subsets, --partition", "are of --nodes")
    return groups
