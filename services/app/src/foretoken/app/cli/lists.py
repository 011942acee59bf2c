"""`foretoken list`: the names that can be used.

The simulator's plug-ins are imported where they are listed: they need numeric libraries.
"""

import inspect
import json
from dataclasses import replace
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from foretoken.app.cli.command_table import LazyGroup, ListedCommand
from foretoken.app.cli.state import CliState, build_table, stack, state_of
from foretoken.domain import schema
from foretoken.domain.frameworks.capability import describe_values
from foretoken.domain.frameworks.engine import EngineProfile, all_engines, find_engine
from foretoken.domain.frameworks.profile_values import ProfileFiles
from foretoken.domain.frameworks.trainer import TrainerProfile, all_trainers, find_trainer
from foretoken.domain.hardware.device import all_devices
from foretoken.domain.hardware.price import all_price_lists
from foretoken.domain.hardware.topology import all_topologies
from foretoken.domain.models.architecture import all_models
from foretoken.domain.models.parameters import count_parameters
from foretoken.domain.models.stack import stack_of
from foretoken.domain.operators.spec.operator import all_operators
from foretoken.domain.requests.dataset import all_datasets
from foretoken.domain.units import GIB


class _Lists(LazyGroup):
    listed = (
        ListedCommand(
            "corrections",
            "calibrate:list_corrections",
            "List the corrections that were learned, newest first.",
        ),
    )


app = typer.Typer(cls=_Lists, help="List the names that can be used.", no_args_is_help=True)

_NAME_HELP = "Print this profile whole: what it extends, each value and where that is from."
_GIGA = 1e9
_TERA = 1e12


@app.command()
def devices(context: typer.Context) -> None:
    """List the devices with their limits, and the other names each can be given by."""
    state_of(context).print_items(
        "Devices",
        all_devices().values(),
        {
            "device": "name",
            "what": "description",
            "memory (GiB)": lambda device: device.memory_bytes / GIB,
            "bandwidth (GB/s)": lambda device: device.memory_bandwidth_bytes_per_s / _GIGA,
            "best peak (TFLOP/s)": lambda device: max(device.peak_flops_per_s.values()) / _TERA,
            "also called": lambda device: ", ".join(device.vendor_names),
        },
    )


@app.command()
def topologies(context: typer.Context) -> None:
    """List the topologies."""
    state_of(context).print_items(
        "Topologies",
        all_topologies().values(),
        {
            "topology": "name",
            "device": "device",
            "per node": "devices_per_node",
            "inside (GB/s)": lambda found: found.intra_node.bandwidth_bytes_per_s / _GIGA,
            "between (GB/s)": lambda found: found.inter_node.bandwidth_bytes_per_s / _GIGA,
            "what": "description",
        },
    )


@app.command()
def models(context: typer.Context) -> None:
    """List the model presets. A `config.json` or a GGUF file works wherever a name does."""
    counts = {name: count_parameters(model) for name, model in all_models().items()}
    state_of(context).print_items(
        "Models",
        all_models().values(),
        {
            "model": "name",
            "parameters (1e9)": lambda model: counts[model.name].total / _GIGA,
            "active (1e9)": lambda model: counts[model.name].active_total / _GIGA,
            "layers": "num_layers",
            "hidden": "hidden",
            "kinds": lambda model: ", ".join(
                dict.fromkeys(part.kind for part, _ in stack_of(model).parts)
            ),
            "stored": "quantization",
            "vocab": "vocab",
        },
    )


@app.command()
def engines(
    context: typer.Context, name: Annotated[str, typer.Argument(help=_NAME_HELP)] = ""
) -> None:
    """List the serving engines' profiles, or all that one of them says.

    Any version within a profile's range works by name.

    Example: `foretoken list engines vllm-0.30`
    """
    if name:
        found = find_engine(name)
        stem = next(stem for stem, of in all_engines().items() if replace(of, name=name) == found)
        _print_profile(state_of(context), "engines", stem, found)
        return
    state_of(context).print_items(
        "Engines",
        all_engines().values(),
        {
            "engine": "name",
            "extends": lambda profile: profile.extends or "-",
            "versions": lambda profile: profile.versions or "-",
            "released": lambda profile: profile.released or "-",
            "scheduler": "scheduler",
            "admission": "admission",
            "tokens a step": "max_num_batched_tokens",
            "requests": "max_num_seqs",
        },
    )


@app.command()
def trainers(
    context: typer.Context, name: Annotated[str, typer.Argument(help=_NAME_HELP)] = ""
) -> None:
    """List the training frameworks' profiles, or all that one of them says.

    Example: `foretoken list trainers megatron-core`
    """
    if name:
        _print_profile(state_of(context), "trainers", name, find_trainer(name))
        return
    state_of(context).print_items(
        "Trainers",
        all_trainers().values(),
        {
            "trainer": "name",
            "extends": lambda profile: profile.extends or "-",
            "framework": lambda profile: profile.framework or "-",
            "versions": lambda profile: profile.versions or "-",
            "attention": "attention",
            "schedules": lambda profile: describe_values(profile.can.has, "pipeline_schedule"),
        },
    )


def _print_profile(
    state: CliState, folder: str, stem: str, profile: EngineProfile | TrainerProfile
) -> None:
    """Print every value of a profile with the file that sets it, and where the files were read."""
    read = ProfileFiles(folder, stem)
    values, sources = list(read.list_values(profile)), read.list_sources()

    def build() -> Table:
        rows = [(one.rule, _show(one.value), one.set_by or "-", one.comment) for one in values]
        table = build_table(stem, ("rule", "value", "set by", "what its file says of it"), rows)
        said = [(f"{one.profile}: {one.source}", one.of_capabilities) for one in sources]
        lines = [f"{text}. What it can do: {can}" if can else text for text, can in said]
        return stack(table, *(escape(line) for line in lines))

    state.print_object({"name": stem, "values": values, "sources": sources}, build)


def _show(value: object) -> str:
    """Return a rule as a scenario has it."""
    plain = schema.encode(value)
    return plain if isinstance(plain, str) else json.dumps(plain)


@app.command()
def schedules(context: typer.Context) -> None:
    """List the pipeline schedules of training."""
    from foretoken.simulator.steps.pipelines.schedule import all_schedules

    rows = [
        (name, found.virtual_stages or "any", found.splits_backward, _summary(found.orders))
        for name, found in all_schedules().items()
    ]
    columns = ("schedule", "chunks a rank", "splits backward", "what")
    state_of(context).print_rows("Schedules", columns, rows)


@app.command()
def routers(context: typer.Context) -> None:
    """List the routers of a cluster, which choose the replica of each request."""
    from foretoken.simulator.cluster.routing import all_routers

    rows = [(name, _summary(router)) for name, router in all_routers().items()]
    state_of(context).print_rows("Routers", ("router", "what"), rows)


@app.command()
def autoscalers(context: typer.Context) -> None:
    """List the autoscaling policies of a cluster, which choose how many replicas a pool has."""
    from foretoken.simulator.cluster.autoscaling import all_autoscalers

    rows = [(name, _summary(policy)) for name, policy in all_autoscalers().items()]
    state_of(context).print_rows("Autoscaling policies", ("policy", "what"), rows)


@app.command()
def prices(context: typer.Context) -> None:
    """List what devices cost by the hour: by which list, where it says so and since when."""
    rows = [
        (
            listed.name,
            price.device,
            price.usd_per_hour or "-",
            price.spot_usd_per_hour or "-",
            price.region or "-",
            price.product,
            price.date,
            price.source,
        )
        for listed in all_price_lists().values()
        for price in listed.prices
    ]
    columns = ("list", "device", "USD/h", "spot", "region", "product", "date", "source")
    state_of(context).print_rows("Prices of one device", columns, rows)


@app.command()
def datasets(context: typer.Context) -> None:
    """List the training sets whose tokens are known."""
    state_of(context).print_items(
        "Datasets",
        all_datasets().values(),
        {
            "dataset": "name",
            "tokens (1e9)": lambda dataset: dataset.num_tokens / _GIGA,
            "counted by": lambda dataset: dataset.tokenizer or "-",
            "date": "date",
            "what": "description",
            "source": "source",
        },
    )


def _summary(plugin: object) -> str:
    """Return the first line of the file that a plug-in is in."""
    return (inspect.getdoc(inspect.getmodule(plugin)) or "").partition("\n")[0]


@app.command()
def operators(context: typer.Context) -> None:
    """List the operators and their dimensions."""
    rows = [
        (spec.name, " ".join(spec.dim_names), spec.summary) for spec in all_operators().values()
    ]
    state_of(context).print_rows("Operators", ("operator", "dimensions", "what"), rows)
