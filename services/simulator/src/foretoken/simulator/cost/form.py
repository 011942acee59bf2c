"""The questions about a deployment, and how the answers make its surfaces."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.domain.hardware.device import find_device
from foretoken.domain.hardware.sustained import MATRIX_GROUPS, is_limited
from foretoken.domain.lowering.graph import BatchShape, OperatorNode, RankContext
from foretoken.domain.measurements.estimate import LatencyColumns
from foretoken.domain.units import Quantity, ceil_divide
from foretoken.simulator.cost import family
from foretoken.simulator.cost.answer import (
    Answers,
    Questions,
    channels_of,
    num_channels,
)
from foretoken.simulator.cost.attention_batching import each_more, find_mixed, repeat_answer
from foretoken.simulator.cost.family import Axes
from foretoken.simulator.cost.ffn_apart import count_micro_batches
from foretoken.simulator.cost.image_encoding import (
    add_image_ends,
    encoder_nodes,
    encoding_channels,
    image_share,
)
from foretoken.simulator.cost.lasting_steps import blend_lasting
from foretoken.simulator.cost.launching import time_launches
from foretoken.simulator.cost.padding import padded_tokens
from foretoken.simulator.cost.rank_waiting import slowest_ratio
from foretoken.simulator.cost.substitute import Substitute, find_folded
from foretoken.simulator.cost.surface import (
    ApartExperts,
    LatencySurfaces,
    PromptSurfaces,
    Surface,
    SurfaceSpec,
)
from foretoken.simulator.cost.two_batches import (
    computed_us,
    count_halves,
    split_transfers,
    waiting_ratio,
)
from foretoken.simulator.grid import Floats, Ints
from foretoken.simulator.software_note import list_software_notes

_BATCHES: Mapping[str, Callable[[Axes], BatchShape]] = {
    "tokens": family.tokens_batch,
    "rows": family.rows_batch,
    "decode": family.decode_batch,
    "prefill": family.prefill_batch,
    "batched": family.prefill_batching,
    "group": family.group_batch,
}

# Surfaces of what prompts have that depends on their tokens.
_LASTING = ("tokens", "prefill", "batched", "group")


class SurfaceForm:
    """The questions about a deployment, and where each answer belongs.

    `ranks` are one of every pipeline stage. `axes` replaces the grids that fit any step: by name
    of a surface, those of `mixed` too. Then `decode_tokens` and `mixed_tokens` of the surfaces mean
    nothing: the token counts there are may be few.
    """

    def __init__(
        self,
        spec: SurfaceSpec,
        ranks: Sequence[RankContext],
        axes: Mapping[str, Axes] | None = None,
    ) -> None:
        self._spec, self._ranks = spec, ranks
        limits, graphs = spec.limits, spec.graphs
        self._decode_tokens = padded_tokens(limits.num_tokens, graphs.decode_sizes)
        self._mixed_tokens = padded_tokens(limits.num_tokens, graphs.mixed_sizes)
        chosen = dict(axes) if axes is not None else self._all_axes()
        self._mixed_axes = chosen.pop("mixed", family.mixed_axes(limits))
        self._axes = chosen
        self._nodes = {
            name: family.varying_nodes(_BATCHES[name](self._parts(name)), spec.options, ranks)
            for name in self._axes
        }
        self._mixed = find_mixed(self._nodes["decode"], self._mixed_axes)
        self._encoder = encoder_nodes(spec, ranks[0])

    def questions(self) -> Questions:
        """Return everything there is to ask."""
        questions = Questions()
        for node in self._all_nodes():
            self._substitute(node).ask(questions)
        for mixed in self._mixed.values():
            mixed.ask(questions)
        return questions

    def lasting_questions(self) -> Questions:
        """Return what of it power can slow in steps with prompts."""
        questions = Questions()
        for node in self._limited_nodes():
            self._substitute(node).ask(questions)
        return questions

    def surfaces(
        self, answers: Answers, model_version: str, slower: Answers | None = None
    ) -> LatencySurfaces:
        """Return the surfaces that the answers make.

        Where there are `slower` answers prompts are slowed as far as their steps last.
        """
        nodes = self._all_nodes()
        by_node = {id(node): self._substitute(node).answer(answers) for node in nodes}
        folded = find_folded([(node, by_node[id(node)]) for node in nodes])
        counted = _Counted(by_node, folded)
        groups = tuple(sorted({node.group for node in nodes}))
        rows, decode = (
            Surface(axes=self._axes[name], values=_sum_nodes(self._nodes[name], groups, counted.of))
            for name in ("rows", "decode")
        )
        token_counts = self._axes["tokens"][0]
        prompts = self._prompt_surfaces(groups, counted)
        bursts = LatencySurfaces(
            model_version=model_version,
            groups=groups,
            tokens=prompts.tokens,
            rows=rows,
            decode=decode,
            mixed=self._mixed_surface(answers, groups),
            prefill=prompts.prefill,
            prefill_more=prompts.prefill_more,
            group=prompts.group,
            apart=prompts.apart,
            decode_tokens=np.searchsorted(token_counts, self._decode_tokens),
            mixed_tokens=np.searchsorted(token_counts, self._mixed_tokens),
            floor_us=self._floor_us(),
            num_engines=self._spec.layout.dp,
            encoding_us=prompts.encoding_us,
            notes=list_software_notes(
                ((node.operator, by_node[id(node)]) for node in nodes),
                self._spec.framework or self._spec.software,
            ),
        )
        if slower is None:
            return bursts
        changed = (*self._limited_nodes(), *self._encoder)
        lasting = {id(node): self._substitute(node).answer(slower) for node in changed}
        slowed = self._prompt_surfaces(groups, _Counted({**by_node, **lasting}, folded))
        return blend_lasting(self._spec, bursts, slowed)

    def _prompt_surfaces(self, groups: Sequence[str], counted: "_Counted") -> PromptSurfaces:
        """Return the surfaces of what prompts have that depends on their tokens."""
        answer_of = counted.of
        tokens, prefill = (
            Surface(axes=self._axes[name], values=_sum_nodes(self._nodes[name], groups, answer_of))
            for name in ("tokens", "prefill")
        )
        tokens.values[:] *= self._count_parts("tokens")
        more = self._each_more(groups, answer_of)
        encoding_us = 0.0
        if self._spec.images is not None:
            encoding = encoding_channels(
                self._encoder,
                groups,
                lambda node: counted.by_node[id(node)],
                self._spec.launches.launch_us,
            )
            encoding_us = float(encoding[: len(groups)].sum())
            share = image_share(self._spec.images, self._axes["prefill"])
            for surface in (prefill, more):
                surface.values[0] += encoding * share
        group, apart = self._group_surfaces(groups, tokens, answer_of)
        return PromptSurfaces(tokens, prefill, more, group, apart, encoding_us)

    def _limited_nodes(self) -> list[OperatorNode]:
        """Return the operators of steps with prompts that meet the limit of power."""
        device, limit_w = find_device(self._spec.device), self._spec.power_limit_w
        return [
            node
            for name in (name for name in _LASTING if name in self._nodes)
            for stage in self._nodes[name]
            for node in stage
            if node.group in MATRIX_GROUPS and is_limited(device, node.dtype, limit_w)
        ]

    def _all_axes(self) -> dict[str, Axes]:
        limits = self._spec.limits
        counts = np.union1d(self._decode_tokens, self._mixed_tokens)
        prefill = family.prefill_axes(limits)
        if self._spec.images is not None:
            prefill = add_image_ends(self._spec.images, prefill)
        axes: dict[str, Axes] = {
            "tokens": (counts,),
            "rows": family.rows_axes(limits),
            "decode": family.decode_axes(limits),
            "prefill": prefill,
            "batched": prefill,
        }
        if self._spec.layout.dp > 1:
            axes["group"] = (np.unique(padded_tokens(limits.num_group_tokens, ())),)
        return axes

    def _count_parts(self, name: str) -> Ints:
        """Return in how many parts the engines compute the steps of a surface."""
        num_engines = self._spec.layout.dp if name == "group" else 1
        return self._parts_of(self._axes[name][0] / num_engines)

    def _parts_of(self, tokens_each: Quantity) -> Ints:
        if self._spec.micro_batches:
            return count_micro_batches(tokens_each, self._spec.micro_batches)
        return count_halves(tokens_each, self._spec.two_batch_tokens)

    def _parts(self, name: str) -> Axes:
        """Return the axes of the larger part of steps; attention is counted as in one."""
        axes = self._axes[name]
        if name not in ("tokens", "group"):
            return axes
        return (ceil_divide(axes[0], self._count_parts(name)),)

    def _group_surfaces(
        self,
        groups: Sequence[str],
        tokens: Surface,
        answer_of: Callable[[OperatorNode], LatencyColumns | None],
    ) -> tuple[Surface | None, ApartExperts | None]:
        """Return what engines in lock step share, without transfers that computation hides.

        Of experts on devices of their own these come apart, for what hides them is not known here.
        """
        if "group" not in self._axes:
            return None, None
        axes, num_parts = self._axes["group"], self._count_parts("group")
        sent, computed = split_transfers(self._nodes["group"])
        sent_values, values = (
            num_parts * _sum_nodes(nodes, groups, answer_of) for nodes in (sent, computed)
        )
        if self._spec.micro_batches:
            return Surface(axes=axes, values=values), ApartExperts(
                sent=Surface(axes=axes, values=sent_values),
                num_parts=num_parts,
                num_layers=sum(node.repeat for node in computed[0]),
            )
        num_groups = len(groups)
        own_us = computed_us(tokens, groups, axes[0] / self._spec.layout.dp)
        ratio = waiting_ratio(
            sent_values[:, :num_groups].sum(axis=1),
            values[:, :num_groups].sum(axis=1) + own_us,
            num_parts,
            sum(node.repeat for node in sent[0]),
        )
        return Surface(axes=axes, values=values + sent_values * ratio[:, None]), None

    def _all_nodes(self) -> list[OperatorNode]:
        nodes = [n for stages in self._nodes.values() for stage in stages for n in stage]
        return [*nodes, *self._encoder]

    def _substitute(self, node: OperatorNode) -> Substitute:
        is_captured = self._spec.graphs.captures(self._axes["tokens"][0])
        return Substitute(node, self._spec, is_captured)

    def _mixed_surface(self, answers: Answers, groups: Sequence[str]) -> Surface:
        """Return what decoding sequences add to a step with prefills."""
        added = {key: mixed.added(answers) for key, mixed in self._mixed.items()}
        is_one_kernel = any(answer is not None for answer in added.values())
        # Kernels of their own take no notice of the prefills.
        first = self._mixed_axes[0] if is_one_kernel else self._mixed_axes[0][:1]

        def answer_of(node: OperatorNode) -> LatencyColumns:
            answer = added.get(id(node))
            if answer is not None:
                return answer
            return repeat_answer(self._substitute(node).answer(answers), len(first))

        values = _sum_nodes(self._nodes["decode"], groups, answer_of)
        return Surface(axes=(first, *self._mixed_axes[1:]), values=values)

    def _each_more(
        self, groups: Sequence[str], answer_of: Callable[[OperatorNode], LatencyColumns | None]
    ) -> Surface:
        """Return what each prefill more takes in a batch."""
        device = find_device(self._spec.device)
        batched_nodes = {
            id(one): batched
            for stages in zip(self._nodes["prefill"], self._nodes["batched"], strict=True)
            for one, batched in zip(*stages, strict=True)
        }

        def more_of(node: OperatorNode) -> LatencyColumns | None:
            one, batched = answer_of(node), answer_of(batched_nodes[id(node)])
            return None if one is None or batched is None else each_more(node, one, batched, device)

        values = _sum_nodes(self._nodes["prefill"], groups, more_of)
        return Surface(axes=self._axes["prefill"], values=values)

    def _floor_us(self) -> Floats:
        """Return what launching a step takes, by [stage, decode or mixed, tokens]."""
        spec, limits = self._spec, self._spec.limits
        launches_us = time_launches(spec.launches, spec.options, self._ranks)
        num_ranks = spec.layout.tp * spec.layout.dp
        launches_us *= slowest_ratio(num_ranks, spec.launches.spread_ratio)
        layers = np.array([float(rank.num_stage_layers) for rank in self._ranks])
        pieces_us = spec.piece_us * layers[:, None]
        floor_us = np.repeat(launches_us[:, None, None], 2, axis=1)
        floor_us = floor_us * np.ones(limits.num_tokens + 1)
        captured = spec.graphs.captures(np.arange(limits.num_tokens + 1))
        if spec.graphs.pads_decodes:
            floor_us[:, 0, captured] = spec.launches.launch_us if spec.graphs.is_full else pieces_us
        if spec.graphs.pads_mixed:
            floor_us[:, 1, captured] = pieces_us
        return floor_us * self._parts_of(np.arange(limits.num_tokens + 1))


@dataclass(frozen=True, slots=True)
class _Counted:
    """The answers of nodes by identity, those of folded roles to be left out of sums."""

    by_node: Mapping[int, LatencyColumns]
    folded: frozenset[str]

    def of(self, node: OperatorNode) -> LatencyColumns | None:
        """Return what a node adds, None where others count it already."""
        return None if node.role in self.folded else self.by_node[id(node)]


def _sum_nodes(
    stages: Sequence[Sequence[OperatorNode]],
    groups: Sequence[str],
    answer_of: Callable[[OperatorNode], LatencyColumns | None],
) -> Floats:
    """Return [stage, channel, grid point] of the operators that have an answer."""
    num_points = 0
    parts: list[tuple[int, Floats]] = []
    for stage, nodes in enumerate(stages):
        for node in nodes:
            answer = answer_of(node)
            if answer is None:
                continue
            channels = node.repeat * channels_of(answer, groups.index(node.group), len(groups))
            num_points = channels.shape[1]
            parts.append((stage, channels))
    values = np.zeros((len(stages), num_channels(len(groups)), num_points))
    for stage, channels in parts:
        values[stage] += channels
    return values
