"""`foretoken list`: the names that can be used.

The simulator's plug-ins are imported where they are listed: they need numeric libraries.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields

import typer

from foretoken.app.cli.command_table import LazyGroup, ListedCommand
from foretoken.app.cli.state import state_of
from foretoken.domain.frameworks.capability import describe_values
from foretoken.domain.frameworks.engine import EngineProfile, all_engines
from foretoken.domain.frameworks.trainer import TrainerProfile, all_trainers
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


# What the list says of what an engine can do; its file says what does not go together.
_ENGINE_ASPECTS = {
    "mode": "pools",
    "ep": "expert parallel",
    "quantization": "weights",
    "kv_dtype": "KV cache",
    "speculation": "speculates",
}


@app.command()
def engines(context: typer.Context) -> None:
    """List the serving engines' profiles: their rules, and what they can do.

    Any version within a profile's range works by name.
    """
    state_of(context).print_items(
        "Engines",
        all_engines().values(),
        {
            "engine": "name",
            "extends": lambda profile: profile.extends or "-",
            "versions": lambda profile: profile.versions or "-",
            "scheduler": "scheduler",
            "tokens a step": "max_num_batched_tokens",
            "requests": "max_num_seqs",
            "admission": "admission",
            "preemption": "preemption",
            "prefix cache": "has_prefix_caching",
            "asynchronous": "has_async_scheduling",
            **{name: _can(aspect) for aspect, name in _ENGINE_ASPECTS.items()},
        },
    )


def _can(aspect: str) -> Callable[[TrainerProfile | EngineProfile], str]:
    """Return what says which values of an aspect a profile has."""
    return lambda profile: describe_values(profile.can.has, aspect)


# What the list says of what a trainer can do; its file says what does not go together.
_TRAINER_ASPECTS = {
    "pipeline_schedule": "schedules",
    "zero_stage": "ZeRO",
    "context_parallel": "sequences split by",
    "weight_parallel": "weights split by",
    "recompute": "recomputes",
}


def _describe_transfers(profile: TrainerProfile) -> str:
    own = profile.interleaved_transfers
    return f"{profile.transfers}, {own} if interleaved" if own else profile.transfers


@app.command()
def trainers(context: typer.Context) -> None:
    """List the training frameworks' profiles: what they do by their own rules, and can do."""
    state_of(context).print_items(
        "Trainers",
        all_trainers().values(),
        {
            "trainer": "name",
            "extends": lambda profile: profile.extends or "-",
            "versions": lambda profile: profile.versions or "-",
            "attention": "attention",
            "accumulation": "gradient_accumulation",
            "transfers": _describe_transfers,
            "hides": lambda profile: ", ".join(_overlapped(profile)) or "nothing",
            **{name: _can(aspect) for aspect, name in _TRAINER_ASPECTS.items()},
            "framework": lambda profile: profile.framework or "-",
        },
    )


def _overlapped(profile: TrainerProfile) -> Iterator[str]:
    """Yield what a trainer hides behind computation."""
    for rule in fields(profile):
        if rule.name.startswith("overlaps_") and getattr(profile, rule.name):
            yield rule.name.removeprefix("overlaps_").replace("_", " ")


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
