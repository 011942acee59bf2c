"""The few points at which a search queries how long steps take, and the answers on them."""

from collections.abc import Mapping, Sequence

import numpy as np

from foretoken.domain.measurements.estimate import LatencyQuery
from foretoken.simulator.cost.answer import Questions
from foretoken.simulator.cost.family import Axes
from foretoken.simulator.cost.form import SurfaceForm
from foretoken.simulator.cost.latency_surfaces import replica_ranks
from foretoken.simulator.cost.padding import padded_tokens
from foretoken.simulator.cost.surface import LatencySurfaces, SurfaceSpec
from foretoken.simulator.grid import Ints, spaced_integers
from foretoken.simulator.latency_source import LatencySource
from foretoken.simulator.search.serving.load import LoadProfile

# Points per doubling. Between captured batches matrix products are close to linear.
_TOKENS_PER_OCTAVE = 3
_PREFILL_PER_OCTAVE = 2
_MIXED_PER_OCTAVE = 1
_SHORTEST_PREFILL = 64
# Contexts before a piece of a prompt: its cost is linear in them.
_NUM_CONTEXTS = 3
# Longest context of a batch over the mean.
_RAGGEDNESS = np.array([1.0, 1.5, 4.0])


def grid_axes(spec: SurfaceSpec, load: LoadProfile, batches: Sequence[int]) -> Mapping[str, Axes]:
    """Return the axes of every surface: the batches that are tried, at the load's mean context."""
    limits = spec.limits
    tried = np.unique(np.minimum(np.array(batches, dtype=np.int64), limits.num_seqs))
    longest = max(min(limits.num_tokens, load.longest), 1)
    context = np.array([max(round(load.context_mean), 1)])
    decode = (tried, context, _RAGGEDNESS)
    pieces = spaced_integers(min(_SHORTEST_PREFILL, longest), longest, _PREFILL_PER_OCTAVE)
    before = np.unique(np.linspace(0, load.longest, _NUM_CONTEXTS).astype(np.int64))
    axes: dict[str, Axes] = {
        "tokens": (_token_counts(spec, tried),),
        "rows": (np.union1d(tried, spaced_integers(1, limits.num_seqs, 1)),),
        "decode": decode,
        "prefill": (pieces, before),
        "batched": (pieces, before),
        "mixed": (spaced_integers(int(pieces[0]), longest, _MIXED_PER_OCTAVE), *decode),
    }
    if spec.layout.dp > 1:
        most = limits.num_group_tokens
        axes["group"] = (np.union1d(tried, spaced_integers(1, most, _TOKENS_PER_OCTAVE)),)
    return axes


def fetch_grids(
    wanted: Sequence[tuple[SurfaceSpec, Mapping[str, Axes]]], predictor: LatencySource
) -> list[LatencySurfaces]:
    """Return the surfaces of many engines; one query for each device, topology and software.

    Raises:
        InvalidRequestError: a layout does not fit its model.
        ForetokenError: whatever the predictor raises.

    """
    forms = [SurfaceForm(spec, replica_ranks(spec), axes) for spec, axes in wanted]
    places = [(spec.device, spec.topology, spec.framework, spec.software) for spec, _ in wanted]
    found: dict[int, LatencySurfaces] = {}
    for place in dict.fromkeys(places):
        members = [index for index, other in enumerate(places) if other == place]
        questions = Questions()
        for index in members:
            for table in forms[index].questions().tables:
                questions.add(table)
        device, topology, framework, software = place
        reply = predictor.predict(
            LatencyQuery(
                device=device,
                tables=questions.tables,
                topology=topology,
                framework=framework,
                preferred_framework=software,
                prefer_measured=True,
            )
        )
        answers = questions.match(reply.tables)
        for index in members:
            found[index] = forms[index].surfaces(answers, reply.model_version)
    return [found[index] for index in range(len(wanted))]


def _token_counts(spec: SurfaceSpec, batches: Ints) -> Ints:
    """Return token counts that cost what they cost by themselves, not by interpolation."""
    most = spec.limits.num_tokens
    whole = np.union1d(spaced_integers(1, most, _TOKENS_PER_OCTAVE), np.minimum(batches, most))
    counts = [padded_tokens(most, ())[whole]]
    if spec.graphs.pads_decodes or spec.graphs.pads_mixed:
        counts.append(padded_tokens(most, spec.graphs.sizes)[whole])
    return np.unique(np.concatenate(counts))
