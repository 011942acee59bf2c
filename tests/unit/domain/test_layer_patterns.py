"""Layers as kinds in a pattern: read, written, checked, sent."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.api.types.v1 import model_pb2
from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.domain.models.architecture import ModelArchitecture, all_models, find_model
from foretoken.domain.models.kinds.spec.kind import all_kinds
from foretoken.domain.models.layer import (
    LayerKind,
    LayerPart,
    every_nth,
    read_pattern,
    write_pattern,
)
from foretoken.domain.models.stack import stack_of, state_of
from foretoken.wire import codec

_NAMES = st.sampled_from(["M", "E", "attn", "full-64"])
_MAMBA = LayerPart(kind="mamba2", dims={"num_heads": 64, "head_dim": 64, "state_dim": 128})
_EXPERTS = LayerPart(
    kind="experts", dims={"num_experts": 128, "top_k": 6, "intermediate": 1856, "is_gated": 0}
)
_ATTENTION = LayerPart(kind="attention", dims={"num_heads": 32, "num_kv_heads": 2, "head_dim": 128})
_HYBRID = ModelArchitecture(
    name="hybrid",
    hidden=2688,
    vocab=131072,
    max_position=262144,
    layers=(
        LayerKind(name="M", mixer=_MAMBA),
        LayerKind(name="E", feed_forward=_EXPERTS),
        LayerKind(name="A", mixer=_ATTENTION),
    ),
    pattern="2*(M E M E M A) E 2*M",
)


@given(st.lists(_NAMES, min_size=1, max_size=40))
def test_a_pattern_that_is_written_is_read_again(names: list[str]) -> None:
    assert tuple(names) == read_pattern(write_pattern(names))


def test_patterns_are_short() -> None:
    assert "15*(3*linear full)" == write_pattern((["linear"] * 3 + ["full"]) * 15)
    assert "3*dense 58*sparse" == write_pattern(["dense"] * 3 + ["sparse"] * 58)
    assert tuple("abababc") == read_pattern(" 3*( a b )c")
    assert tuple("aabaab") == read_pattern("2*(2*a b)")


@pytest.mark.parametrize("pattern", ["(a", "a)", "99999*a", "4096*(2*a)", "3*", "a * * b", "0*a"])
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequestError):
        read_pattern(pattern)


def test_the_layers_of_a_pattern_are_counted_and_placed() -> None:
    stack = stack_of(_HYBRID)
    assert 15 == _HYBRID.num_layers
    assert (0, 2, 4, 6, 8, 10, 13, 14) == stack.mixers[_MAMBA]
    assert (5, 11) == stack.mixers[_ATTENTION]
    assert {_EXPERTS: (1, 3, 7, 9, 12)} == stack.experts


def test_models_of_like_layers_are_stacks_too() -> None:
    """Windows with a period, experts after dense layers, latent attention: as presets say them."""
    windows = stack_of(find_model("gpt-oss-20b"))
    assert {128: tuple(range(0, 24, 2)), 0: tuple(range(1, 24, 2))} == {
        part["window"]: layers for part, layers in windows.mixers.items()
    }
    assert 128 == windows.window
    deepseek = stack_of(find_model("deepseek-v3"))
    assert [("latent", 61)] == [(p.kind, len(at)) for p, at in deepseek.mixers.items()]
    assert [("mlp", 3), ("experts", 58)] == [
        (part.kind, len(layers)) for part, layers in deepseek.feed_forwards.items()
    ]


def test_every_layer_of_a_preset_has_both_halves() -> None:
    for model in all_models().values():
        layers = stack_of(model).layers
        assert model.num_layers == len(layers)


def test_what_a_request_keeps_by_hand() -> None:
    assert 2 * 2 * 128 == state_of(_ATTENTION).token_elements
    assert 2 * 1 * 128 == state_of(_ATTENTION, tp=8).token_elements
    inputs = (4096 + 2 * 128) * 3 * 2
    assert 64 * 64 * 128 * 4 + inputs == state_of(_MAMBA).request_bytes
    windowed = state_of(_ATTENTION.changed(window=512))
    assert (0, 512, 512) == (
        windowed.token_elements,
        windowed.window_elements,
        windowed.window_tokens,
    )


def test_a_pattern_travels_and_is_a_key() -> None:
    message = codec.encode(_HYBRID, model_pb2.ModelArchitecture)
    assert _HYBRID == codec.decode(message, ModelArchitecture)
    assert _HYBRID == schema.decode(ModelArchitecture, schema.encode(_HYBRID))
    assert {_HYBRID: 1} == {codec.decode(message, ModelArchitecture): 1}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pattern": "M E A X"}, "pattern"),
        ({"pattern": "M E"}, "pattern"),
        ({"num_layers": 7}, "num_layers"),
        ({"num_heads": 8}, "num_heads"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"layers": (LayerKind(name="M", mixer=_EXPERTS),), "pattern": "M"}, "layers"),
        ({"extras": (_MAMBA,)}, "extras"),
    ],
)
def test_layers_that_contradict_are_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        dataclasses.replace(_HYBRID, **{"num_layers": 0, **changes})
    assert [field] == [violation.field for violation in caught.value.violations]


def test_a_kind_checks_its_dimensions() -> None:
    with pytest.raises(UnknownPluginError, match="mamba2"):
        LayerPart(kind="mamba3", dims={})
    with pytest.raises(InvalidRequestError) as caught:
        LayerPart(kind="mlp", dims={"width": 4})
    assert ["width", "intermediate"] == [violation.field for violation in caught.value.violations]
    with pytest.raises(InvalidRequestError, match="must divide"):
        _ATTENTION.changed(num_kv_heads=5)
    with pytest.raises(InvalidRequestError, match="begins with no digit"):
        LayerKind(name="3a", mixer=_MAMBA)


def test_kinds_say_where_they_stand_and_what_they_rest_on() -> None:
    for name, kind in all_kinds().items():
        assert name == kind.name
        assert "" not in (kind.summary, kind.source)
        # What can be trained says by whose backward pass, and all else why not.
        assert bool(kind.backward) != bool(kind.untrained)


@pytest.mark.parametrize(
    ("period", "place", "expected"),
    [(2, -1, [1, 3]), (3, 0, [0, 3]), (3, 1, [1, 4]), (3, 3, []), (1, -1, [*range(5)]), (0, 0, [])],
)
def test_one_of_every_so_many_layers(period: int, place: int, expected: list[int]) -> None:
    found = every_nth(5, period, place)
    assert expected == [layer for layer, is_it in enumerate(found) if is_it]
    assert 5 == len(found)
