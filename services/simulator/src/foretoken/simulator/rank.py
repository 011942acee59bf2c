"""The ranks a simulation queries: one of every pipeline stage, for the others are alike."""

from dataclasses import replace

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.topology import TopologySpec, topology_of_device
from foretoken.domain.lowering.graph import RankContext
from foretoken.domain.models.architecture import ModelArchitecture
from foretoken.domain.requests.layout import ParallelLayout
from foretoken.domain.requests.scenario import ServingScenario, TrainingScenario
from foretoken.domain.units import ceil_divide


def stage_ranks(
    model: ModelArchitecture, layout: ParallelLayout, device: str, topology: str
) -> tuple[RankContext, ...]:
    """Return one rank of every pipeline stage; without a topology the device's own is taken.

    Raises:
        UnknownDeviceError: no such device.
        UnknownTopologyError: no such topology, or none of the device where more than one is used.

    """
    rank = _first_rank(model, layout, device, topology)
    return tuple(replace(rank, stage=stage) for stage in range(layout.pp))


def chunk_ranks(scenario: TrainingScenario) -> tuple[RankContext, ...]:
    """Return a rank for every chunk of layers, in the order of the model.

    There are `virtual_stages` chunks for each rank of the pipeline; which of them a rank holds is
    the schedule's to say. The model has the vocabulary of the framework, padded.

    Raises:
        UnknownDeviceError: no such device.
        UnknownTopologyError: no such topology, or none of the device where more than one is used.

    """
    layout, layers = scenario.layout, chunk_layers(scenario)
    rank = _first_rank(_padded_model(scenario), layout, scenario.device, scenario.topology)
    return tuple(replace(rank, stage=stage, layers_by_stage=layers) for stage in range(len(layers)))


def chunk_layers(scenario: TrainingScenario) -> tuple[int, ...]:
    """Return the layers of every chunk, in the order of the model."""
    num_chunks = scenario.layout.pp * scenario.virtual_stages
    return scenario.stage_layers or even_layers(scenario.model.num_layers, num_chunks)


def _padded_model(scenario: TrainingScenario) -> ModelArchitecture:
    model, rows = scenario.model, scenario.trainer.resolve().vocab_multiple * scenario.layout.tp
    return replace(model, vocab=int(ceil_divide(model.vocab, rows)) * rows)


def even_layers(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Return the layers of every chunk, in the order of the model.

    Where they do not divide, the embedding and the head count as a layer each if that makes all
    chunks alike: the first chunk and the last have one layer less, or the last has, of the head
    alone. Otherwise the first chunks have one more.
    Source: Megatron-LM, `transformer_block.py` (`account_for_embedding_in_pipeline_split` and
    `account_for_loss_in_pipeline_split`).
    """
    whole, rest = divmod(num_layers, num_chunks)
    first_long = 1 if rest and has_even_chunks(num_layers, num_chunks, 2) else 0
    return tuple(
        whole + (1 if first_long <= chunk < first_long + rest else 0) for chunk in range(num_chunks)
    )


def count_parts(num_layers: int) -> int:
    """Return the most chunks of a model: each has a layer, the embedding or the head."""
    return num_layers + 2


def has_even_chunks(num_layers: int, num_chunks: int, num_ends: int) -> bool:
    """Tell whether chunks are alike when `num_ends` of embedding and head count as layers."""
    return (num_layers + num_ends) % num_chunks == 0


def even_chunk_counts(num_layers: int, pp: int) -> list[int]:
    """Return the chunks per rank that can be alike, also with the ends counted as layers.

    A pipeline of one rank has nothing to interleave.
    """
    most = count_parts(num_layers) // pp if pp > 1 else 1
    ends = range(count_parts(0) + 1)
    return [
        count
        for count in range(1, most + 1)
        if count == 1 or any(has_even_chunks(num_layers, pp * count, end) for end in ends)
    ]


def links_of(scenario: ServingScenario | TrainingScenario, device: str) -> TopologySpec:
    """Return the links of a device: those of the scenario, of another device its first.

    Raises:
        UnknownTopologyError: none is known.

    """
    own = scenario.topology if device == scenario.device else ""
    return topology_of_device(find_device(device).name, own)


def links_within(layout: ParallelLayout, device: str, topology: str) -> TopologySpec | None:
    """Return the links of a layout's devices; None for one alone of which no topology is named.

    Raises:
        UnknownTopologyError: none is known.

    """
    if not topology and layout.num_devices == 1:
        return None
    return topology_of_device(find_device(device).name, topology)


def _first_rank(
    model: ModelArchitecture, layout: ParallelLayout, device: str, topology: str
) -> RankContext:
    links = links_within(layout, device, topology)
    return RankContext(
        model=model,
        layout=layout,
        devices_per_node=links.devices_per_node if links else 1,
        ports_per_node=links.ports_per_node if links else 0,
    )
