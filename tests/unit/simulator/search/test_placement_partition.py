"""Methods that cut a chain of layers to stages."""

import numpy as np
import pytest

from foretoken.domain.errors import InvalidRequestError, UnknownPluginError
from foretoken.simulator.search.placement.chain import Chain, find_method
from foretoken.simulator.search.placement.partition.ilp import cut_by_program


def test_even_gives_the_first_stages_what_is_over() -> None:
    chain = Chain.of([9, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0])
    assert find_method("even").cut(chain).num_nodes == (3, 3, 2)


def test_slow_stages_get_fewer_layers() -> None:
    """A device three times as slow has a layer where another has three."""
    chain = Chain.of([[1, 3]] * 8, [0, 1, 0, 1])
    for name in ("min_max", "dynamic", "ilp", "brute_force"):
        cut = find_method(name).cut(chain)
        assert cut.num_nodes == (3, 1, 3, 1)
        assert cut.longest == 3


def test_of_cuts_as_good_the_least_total_is_taken() -> None:
    """A large node makes the longest stage; the others are cheapest where they are quick."""
    chain = Chain.of([[1, 9], [1, 2], [30, 30], [1, 9]], [0, 1, 0])
    assert find_method("dynamic").cut(chain).num_nodes in {(1, 1, 2), (2, 1, 1)}
    costs = [[1, 3], [1, 3], [1, 3], [9, 9]]
    assert find_method("dynamic").cut(Chain.of(costs, [0, 1, 0])).num_nodes == (2, 1, 1)


def test_memory_moves_layers_to_where_there_is_room() -> None:
    chain = Chain.of([1] * 6, [0, 0], bytes_needed=[1] * 6, bytes_there=[2, 5])
    for name in ("min_max", "dynamic", "ilp", "brute_force"):
        cut = find_method(name).cut(chain)
        assert cut.num_nodes == (2, 4)
    assert find_method("even").cut(chain).num_nodes == ()


def test_no_cut_is_found_where_none_fits() -> None:
    chain = Chain.of([1] * 6, [0, 0], bytes_needed=[1] * 6, bytes_there=[2, 3])
    for name in ("even", "min_max", "dynamic", "ilp", "brute_force"):
        assert find_method(name).cut(chain).num_nodes == ()


def test_an_expensive_transfer_is_avoided() -> None:
    chain = Chain.of([2, 2, 2, 2], [0, 0], transfers=[[0], [5], [0]])
    assert find_method("dynamic").cut(chain).num_nodes in {(1, 3), (3, 1)}
    assert find_method("dynamic").cut(chain).longest == 6


def test_seven_hundred_nodes_go_to_sixty_four_stages() -> None:
    """No cut is shorter than the mean of its stages, or than the largest node."""
    costs = np.random.default_rng(7).uniform(0.5, 2, 700)
    chain = Chain.of(costs, [0] * 64)
    shortest = max(costs.sum() / 64, costs.max())
    cuts = [find_method(name).cut(chain) for name in ("min_max", "dynamic")]
    assert cuts[0].longest == cuts[1].longest
    assert shortest <= cuts[0].longest <= shortest + costs.max()


def test_brute_force_refuses_what_would_take_too_long() -> None:
    with pytest.raises(InvalidRequestError, match="use dynamic"):
        find_method("brute_force").cut(Chain.of([1] * 80, [0] * 16))


def test_a_solver_that_was_stopped_says_so() -> None:
    costs = np.random.default_rng(7).uniform(0.5, 2, (60, 3))
    chain = Chain.of(costs, [stage % 3 for stage in range(12)])
    cut = cut_by_program(chain, time_limit_s=0.0)
    assert "stopped" in cut.note
    assert not cut.is_optimal
    assert sum(cut.num_nodes) == 60


@pytest.mark.parametrize(
    ("costs", "kinds"),
    [([1.0], [0, 0]), ([1.0, -1.0], [0]), ([1.0, 1.0], [1]), ([float("inf")], [0]), ([1.0], [])],
)
def test_chains_that_cannot_be_cut_are_refused(costs: list[float], kinds: list[int]) -> None:
    with pytest.raises(InvalidRequestError):
        Chain.of(costs, kinds)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="chain"):
        Chain.of([1, 1, 1], [0, 0], transfers=[[1], [1], [1]])


def test_unknown_methods_name_the_nearest() -> None:
    with pytest.raises(UnknownPluginError, match="min_max"):
        find_method("minmax")
