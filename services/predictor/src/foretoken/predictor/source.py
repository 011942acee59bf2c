"""Whose measurements answer a question: the device's own, or those of one that is much like it."""

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from foretoken.domain.hardware.device import DeviceSpec, all_devices, find_device
from foretoken.domain.hardware.topology import find_topology
from foretoken.domain.measurements.estimate import Phase
from foretoken.domain.operators.spec.operator import OperatorSpec
from foretoken.predictor.model_set import Choice, ModelSet, Wanted
from foretoken.predictor.roofline import FloatColumn, Target
from foretoken.predictor.software import (
    DEFAULT_SOFTWARE,
    Relation,
    library_doubt_log,
    parse_software,
    software_doubt_log,
)
from foretoken.predictor.transfer.own_points import MIN_POINTS
from foretoken.predictor.transfer.relatives import GROUPS, MAX_RELATIVES, apart_log, may_show
from foretoken.predictor.transfer.siblings import (
    SIBLING_DOUBT_LOG,
    find_linked_alike,
    find_siblings,
)
from foretoken.predictor.transfer.support import Support

# Within which factor 90 % of truths lie of a model of so many points: this over their root, and
# what is left with very many. Source: GEMM of four devices in 16-bit formats, 25, 10, 5.6 and 3 %
# mean error with 20, 100, 1,000 and 35,742 points; of a normal error 90 % are within 2.06 times it.
_ONE_POINT_LOG, _MANY_POINTS_LOG = 2.3, 0.062
# Further uncertainty about the times of another kernel or variant. Source: versions move attention
# and MoE by 5 to 97 %, most operators by less.
_OTHER_CODE_LOG = math.log(1.3)
# A device's own model is asked alone where it errs less than this on points left out, or has more
# points than this: others cannot add a twentieth to it. Source: as for borrowing in a training.
_GOOD_ERROR_RATIO, _MANY_POINTS = 0.04, 1_000


@dataclass(frozen=True, slots=True)
class Source:
    """Models that may answer, the nearest to what was asked first, and where they measured."""

    choices: Sequence[Choice]
    target: Target

    @property
    def choice(self) -> Choice:
        """The model nearest to what was asked."""
        return self.choices[0]

    @property
    def identity(self) -> tuple[Hashable, ...]:
        """What its answers to one query depend on: its models, and what each is to the query."""
        return tuple((choice.head.content_hash, *choice.rank) for choice in self.choices)

    def doubt_log(self, spec: OperatorSpec, asked: Target) -> float:
        """Return how far off 90 % of its answers are expected at most, before it is loaded."""
        head = self.choice.head
        # A starter's points are those that tell the rest of a full table.
        num_points = math.inf if head.origin else head.num_points
        doubts = (
            _ONE_POINT_LOG / math.sqrt(num_points),
            _MANY_POINTS_LOG,
            choice_doubt_log(self.choice, spec),
            0.0 if self.target.device is asked.device else SIBLING_DOUBT_LOG,
        )
        return math.hypot(*doubts)

    @property
    def is_sure(self) -> bool:
        """Whether nobody else's measurements could make its answers better."""
        head = self.choice.head
        if head.origin or head.num_points > _MANY_POINTS:
            return True
        report = self.choice.model.report
        return report.num_held_out > 0 and report.held_out_mape_ratio <= _GOOD_ERROR_RATIO

    def ran_slow_kernels(self, support: Support) -> bool:
        """Tell whether it measured kernels of another kind than everyone else's."""
        key = self.choice.head.key
        return (key.framework, key.variant) in support.slow_kernels(self.target.device)


def choice_doubt_log(choice: Choice, spec: OperatorSpec) -> float:
    """Return the further uncertainty about times of another software, kernel or variant."""
    key = choice.head.key
    doubt_log = software_doubt_log(choice.software, spec, key.dtype, key.variant)
    return max(doubt_log, _OTHER_CODE_LOG) if choice.is_other_code else doubt_log


def answer_doubt_log(choice: Choice, latency_us: FloatColumn) -> float | FloatColumn:
    """Return what `choice_doubt_log` is for answers of so many µs, once the model is loaded."""
    series = choice.model.series
    doubt_log = choice_doubt_log(choice, series.key.spec)
    if choice.is_other_code:
        return max(doubt_log, series.noise_log)
    if choice.software is Relation.LIBRARY and not series.key.spec.is_collective:
        return library_doubt_log(latency_us)
    return doubt_log


def find_sources(
    models: ModelSet, spec: OperatorSpec, target: Target, wanted: Wanted
) -> Sequence[Source]:
    """Return the sources that may answer, the one expected to err least first.

    That is the device's own one alone where it is sure. Else those of other measurements come with
    it: of a starter catalog, of the same chip in another product. For own measurements of other
    software a starter's stand in only if they are of the software asked for or its library's, for
    sure ones of other code only if it has nearer; and where own ones are sure another product's
    stand in only if it ran software nearer to what was asked. Links are not those of the chip, so a
    collective has no source elsewhere; inside a node `target_linked_alike` may know one.
    """

    def doubt_log(source: Source) -> float:
        return source.doubt_log(spec, target)

    layers = models.layers
    found: Sequence[Source] = sorted(_on(layers, spec, target, wanted), key=doubt_log)
    own = [item for item in found if _is_own(item.choice)] or _of_home(found)
    is_sure = bool(own) and own[0].is_sure
    if own and _is_else(own[0].choice):
        found, layers = [*_nearer_than(own[0].choice, found), *own], layers[:1]
    elif is_sure:
        return own[:1]
    if spec.is_collective:
        return own
    siblings: Sequence[DeviceSpec] = find_siblings(target.device, target.dtype)
    if is_sure and not own[0].choice.is_other_code:
        siblings = [it for it in siblings if _ran_nearer(layers, spec, it, wanted, own[0].choice)]
    elsewhere = [
        source
        for sibling in siblings
        for source in _on(layers, spec, replace(target, device=sibling), wanted)
    ]
    return sorted([*found, *elsewhere], key=doubt_log)


def find_source(
    models: ModelSet, spec: OperatorSpec, target: Target, wanted: Wanted
) -> Source | None:
    """Return the source that is expected to err least, None where there is none."""
    return next(iter(find_sources(models, spec, target, wanted)), None)


def find_relatives(
    models: ModelSet, spec: OperatorSpec, target: Target, wanted: Wanted
) -> Sequence[Source]:
    """Return sources on devices of other chips, the most alike first, one of each chip.

    All ran the software asked for, in some version, and the very operator and variant. Who ran
    kernels of another kind than everyone else has a say only as the most alike.
    """
    if spec.group not in GROUPS or target.phase is not Phase.FORWARD:
        return ()
    software = parse_software(wanted.software or DEFAULT_SOFTWARE)

    def has_run(device: DeviceSpec) -> bool:
        return may_show(device, target.device) and any(
            software.relate(name, spec.name)[0] < Relation.LIBRARY
            for layer in models.layers
            for name in layer.frameworks_of((spec.name, device.name))
        )

    support = models.transfer(spec, target.device, wanted.variant, target.dtype).support
    found: list[Source] = []
    chips: set[str] = {target.device.name}
    apart = {it.name: apart_log(target.device, it) for it in all_devices().values()}
    for device in sorted(filter(has_run, all_devices().values()), key=lambda it: apart[it.name]):
        if device.name in chips or len(found) == MAX_RELATIVES:
            continue
        asked = replace(target, device=device)
        sources = [it for it in _on(models.layers, spec, asked, wanted) if _ran_the_very(it.choice)]
        if sources:
            best = min(sources, key=lambda it: it.doubt_log(spec, asked))
            if found and best.ran_slow_kernels(support):
                continue
            found.append(best)
            chips |= {it.name for it in (device, *find_siblings(device, target.dtype))}
    return found


def _ran_the_very(choice: Choice) -> bool:
    return not choice.is_other_code and choice.software < Relation.LIBRARY


def may_join(source: Source, asked: Target) -> bool:
    """Tell whether own points are too few to answer without what other chips show."""
    has_room = source.choice.software < Relation.LIBRARY and not source.is_sure
    return _may_correct(source, asked) and has_room


def choose_correction(sources: Sequence[Source], asked: Target) -> tuple[Source, Source] | None:
    """Return the source of own points that correct another's answers, and that other; or None.

    Own points are of the very operator, and of the software that the other's are of, or of one
    nearer to what was asked.
    """
    own = next((source for source in sources if _may_correct(source, asked)), None)
    if own is None:
        return None
    others = (source for source in sources if source is not own)
    alike = (item for item in others if own.choice.software <= item.choice.software)
    reference = next((item for item in alike if not _is_worse(item, own)), None)
    return (own, reference) if reference is not None else None


def _may_correct(source: Source, asked: Target) -> bool:
    choice = source.choice
    is_own = source.target is asked and _is_own(choice)
    return is_own and choice.head.num_points >= MIN_POINTS


def _is_worse(source: Source, own: Source) -> bool:
    """Whether a source is of code that own points are not of, or has fewer points itself."""
    choice = source.choice
    return choice.is_other_code or choice.head.num_points < own.choice.head.num_points


def _is_own(choice: Choice) -> bool:
    """Whether a choice is of own measurements of the very code that was asked for."""
    return not choice.head.origin and not choice.is_other_code


def _of_home(found: Sequence[Source]) -> Sequence[Source]:
    """Return the sure sources of own measurements, unless a starter has the very code; else all."""
    if any(it.choice.head.origin and not it.choice.is_other_code for it in found):
        return found
    return [it for it in found if not it.choice.head.origin and it.is_sure] or found


def _is_else(choice: Choice) -> bool:
    """Whether a choice is of another software, kernel or variant than was asked for."""
    return choice.is_other_code or bool(choice.other_framework)


def _nearer_than(own: Choice, found: Sequence[Source]) -> Iterator[Source]:
    """Yield a starter's sources of the software asked for where own ones are of quite another."""
    for source in found:
        choice = source.choice
        is_of_it = not choice.is_other_code and choice.software < Relation.OTHER
        if choice.head.origin and is_of_it and own.software is Relation.OTHER:
            yield source


def _ran_nearer(
    layers: Sequence[ModelSet],
    spec: OperatorSpec,
    device: DeviceSpec,
    wanted: Wanted,
    choice: Choice,
) -> bool:
    """Tell whether an operator was measured on a device under software nearer than a choice's."""
    software = parse_software(wanted.software)
    names = (name for layer in layers for name in layer.frameworks_of((spec.name, device.name)))
    own = choice.software, choice.versions_apart
    dtype = choice.head.key.dtype
    return any(software.relate(name, spec.name, dtype, wanted.variant) < own for name in names)


def _on(
    layers: Sequence[ModelSet], spec: OperatorSpec, target: Target, wanted: Wanted
) -> Iterator[Source]:
    for layer in layers:
        choices = layer.rank(spec, target, wanted)
        if choices:
            yield Source(choices, target)


def target_inside_node(target: Target) -> Target:
    """Return what a collective inside a node runs on: the topology that its nodes are those of."""
    topology = target.topology
    if topology is None or not topology.nodes_like:
        return target
    return replace(target, topology=find_topology(topology.nodes_like))


def target_linked_alike(
    models: ModelSet, spec: OperatorSpec, target: Target, wanted: Wanted
) -> Target | None:
    """Return where a collective inside a node was measured on nodes that are linked alike.

    None where the target's own nodes were measured, or none like them were.
    """
    if target.topology is None or models.choose(spec, target, wanted) is not None:
        return None
    for topology in find_linked_alike(target.topology):
        alike = replace(target, device=find_device(topology.device), topology=topology)
        if models.choose(spec, alike, wanted) is not None:
            return alike
    return None
