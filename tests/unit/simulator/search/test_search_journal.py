"""What a search has done survives the death of its process, and is done once."""

import dataclasses
import enum
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import search_tasks
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.jobs.executors.inline import InlineExecutor
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.search.journal import Journal, fingerprint, run_journaled


class _Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class _Point:
    name: str
    sizes: tuple[int, ...] = ()
    options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    color: _Color = _Color.RED


def _run(journal: Journal, items: list[int], folder: Path) -> dict[int, int]:
    found = run_journaled(InlineExecutor(), journal, search_tasks.count_call, items, str(folder))
    return dict(found)


def _num_calls(folder: Path) -> dict[int, int]:
    return {int(path.name): len(path.read_text("ascii")) for path in folder.iterdir()}


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    folder = tmp_path / "calls"
    folder.mkdir()
    return folder


def test_what_is_kept_is_not_done_again(tmp_path: Path, calls: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        assert {0: 5, 1: 6} == _run(journal, [5, 6], calls)
    with Journal(tmp_path / "j") as journal:
        assert {0: 7, 1: 6, 2: 5} == _run(journal, [7, 6, 5], calls)
    assert {5: 1, 6: 1, 7: 1} == _num_calls(calls)


def test_equal_items_are_done_once(tmp_path: Path, calls: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        assert {0: 5, 1: 5, 2: 6} == _run(journal, [5, 5, 6], calls)
    assert {5: 1, 6: 1} == _num_calls(calls)


def test_another_function_or_other_data_is_another_result(tmp_path: Path) -> None:
    executor = InlineExecutor()
    with Journal(tmp_path / "j") as journal:
        assert {0: 3} == dict(run_journaled(executor, journal, search_tasks.add, [1], 2))
        assert {0: 4} == dict(run_journaled(executor, journal, search_tasks.add, [1], 3))
        assert {0: 2.0} == dict(run_journaled(executor, journal, search_tasks.divide, [1], 2))
        assert 3 == len(journal)


def test_what_was_done_before_an_error_is_kept(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal, pytest.raises(InvalidRequestError):
        list(run_journaled(InlineExecutor(), journal, search_tasks.refuse, range(4), None))
    with Journal(tmp_path / "j") as journal:
        assert 2 == len(journal)


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=8,
)


@given(value=_PLAIN)
def test_equal_data_have_equal_fingerprints(value: Any) -> None:
    """Also a copy that shares nothing, as another process has it."""
    copy = pickle.loads(pickle.dumps(value))  # noqa: S301 - of a line above
    assert fingerprint(value) == fingerprint(copy)


def test_data_that_differ_have_other_fingerprints() -> None:
    values: list[Any] = [
        1, 1.0, True, "1", b"1", None, [1], (1,), [[1]], [1, 1], {"a": 1}, {"a": 2}, {"b": 1},
        ["ab", "c"], ["a", "bc"], _Color.RED, _Color.BLUE, _Point("a"), _Point("b"),
        _Point("a", (1,)), _Point("a", options={"x": 1.0}), _Point("a", color=_Color.BLUE),
        np.arange(4), np.arange(4.0), np.arange(4).reshape(2, 2), flat_tables(), flat_tables(2.0),
        search_tasks.add, search_tasks.divide, {1}, {1, 2},
    ]  # fmt: skip
    assert len(values) == len({fingerprint(value) for value in values})


def test_the_order_of_keys_does_not_count() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


def test_what_no_other_process_knows_has_no_fingerprint() -> None:
    with pytest.raises(TypeError, match="no name"):
        fingerprint(lambda: 1)
