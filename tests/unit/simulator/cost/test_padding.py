import numpy as np
import pytest

from foretoken.domain.frameworks.engine import EngineSpec, find_engine
from foretoken.simulator.cost.padding import graph_rule, padded_tokens


@pytest.mark.parametrize(
    ("num_tokens", "paid"), [(0, 1), (1, 1), (64, 64), (65, 80), (2048, 2048), (2049, 2112)]
)
def test_tokens_are_rounded_up_to_whole_tiles(num_tokens: int, paid: int) -> None:
    assert padded_tokens(4096, ())[num_tokens] == paid


@pytest.mark.parametrize(("num_tokens", "paid"), [(0, 4), (4, 4), (5, 24), (24, 24), (25, 25)])
def test_tokens_are_padded_to_captured_sizes(num_tokens: int, paid: int) -> None:
    assert padded_tokens(64, (4, 24))[num_tokens] == paid


def test_padding_never_takes_tokens_away_and_never_falls() -> None:
    padded = padded_tokens(9000, (1, 2, 100))
    assert (padded >= range(9001)).all()
    assert (padded[1:] >= padded[:-1]).all()


def test_an_engine_pads_as_its_graphs_say() -> None:
    vllm, plain = graph_rule(find_engine("vllm-0.19")), graph_rule(find_engine("plain"))
    assert (vllm.is_full, vllm.pads_decodes, vllm.pads_mixed) == (True, True, True)
    assert (plain.sizes, plain.largest, plain.pads_decodes) == ((), 0, False)


@pytest.mark.parametrize(
    ("pads", "sizes", "captured"),
    [("true", (4, 24), [1, 4, 5, 24]), ("false", (), [4, 24])],
)
def test_without_padding_only_the_captured_sizes_have_a_graph(
    pads: str, sizes: tuple[int, ...], captured: list[int]
) -> None:
    rules = {"graph_mode": "full", "graph_capture_sizes": "[4, 24]", "pads_to_graphs": pads}
    graphs = graph_rule(EngineSpec(profile="plain", rules=rules).resolve())
    counts = np.array([1, 4, 5, 24, 25])
    assert (graphs.decode_sizes, graphs.mixed_sizes) == (sizes, ())
    assert counts[graphs.captures(counts)].tolist() == captured
