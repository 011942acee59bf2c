"""Names from outside keep to an alphabet, and what becomes a path stays in its folder."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.name import MAX_NAME_CHARS, check_name, is_name, path_inside, text_to_name

_CLIMBING = [
    "../x",
    "a/../../x",
    "..",
    "a/..",
    "/x",
    "//x",
    "",
    ".",
    "a//b",
    "a/./b",
    "..\\x",
    "a\0b",
    "a\nb",
    "x" * 256,
    "é" * 128,
]


@pytest.mark.parametrize("name", ["0f" * 8, "a", "-", "_x", "H200.v-1_b", "a..b", "A" * 128])
def test_names_of_the_alphabet_are_names(name: str) -> None:
    assert name == check_name(name, "name")


@pytest.mark.parametrize(
    "name", [*_CLIMBING, ".hidden", "a b", "a/b", "a:b", "a%2f", "é", "٣", "a\n"]
)
def test_others_are_refused_with_their_field(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"artifact\.name: .* is no name") as caught:
        check_name(name, "artifact.name")
    assert len(caught.value.message) < 300


@given(st.text(max_size=200))
def test_any_text_makes_a_name_with_room_for_more(text: str) -> None:
    name = text_to_name(text)
    assert is_name(name)
    assert len(name) <= MAX_NAME_CHARS // 2
    assert name == text_to_name(name)


@given(st.text(max_size=40))
def test_a_name_is_the_path_of_a_file_right_in_the_folder(text: str) -> None:
    if is_name(text):
        assert Path("/f") == path_inside(Path("/f"), text).parent


@pytest.mark.parametrize("name", _CLIMBING)
def test_no_path_leads_out_of_its_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"out: .* leads out of its folder"):
        path_inside(tmp_path, name, "out")


@given(st.lists(st.sampled_from(["..", ".", "a", "b", "", "/", "\\"]), max_size=6).map("/".join))
def test_what_is_joined_lies_below_the_folder(name: str) -> None:
    folder = Path("/somewhere/else")
    try:
        path = path_inside(folder, name)
    except InvalidRequestError:
        return
    assert folder in path.parents
    assert folder / name == path


def test_links_are_no_way_out(tmp_path: Path) -> None:
    """A folder may be a link itself: whoever runs the service chose it."""
    (tmp_path / "real" / "below").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "out").symlink_to(tmp_path)
    (tmp_path / "real" / "in").symlink_to(tmp_path / "real" / "below")
    assert tmp_path / "home/below/a" == path_inside(tmp_path / "home", "below/a")
    assert tmp_path / "home/in/a" == path_inside(tmp_path / "home", "in/a")
    with pytest.raises(InvalidRequestError, match="leads out"):
        path_inside(tmp_path / "home", "out/a")
