"""What the weights of a checkpoint take, by its safetensors files."""

import struct
from pathlib import Path

import pytest
from checkpoint_examples import write_index, write_safetensors

from foretoken.domain.models.checkpoint_files import checkpoint_bytes


def test_an_index_says_what_all_tensors_take(tmp_path: Path) -> None:
    """No file of weights need be there; some writers give a number with a point."""
    write_index(tmp_path, {"a": "model-00001-of-00001.safetensors"}, total_size=16_060_522_496.0)
    assert checkpoint_bytes(tmp_path) == 16_060_522_496


def test_without_a_sum_the_headers_of_all_files_say_it(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    write_safetensors(tmp_path / "one.safetensors", {"a": (0, 400), "b": (400, 1000)})
    assert checkpoint_bytes(tmp_path) == 0
    write_safetensors(tmp_path / "two.safetensors", {"c": (0, 24)})
    assert checkpoint_bytes(tmp_path) == 1024


def test_a_single_file_has_a_header(tmp_path: Path) -> None:
    assert checkpoint_bytes(tmp_path) == 0
    write_safetensors(tmp_path / "model.safetensors", {"a": (0, 6), "b": (6, 20)})
    assert checkpoint_bytes(tmp_path) == 20


def test_an_index_leads_to_no_other_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(tmp_path / "other.safetensors", {"a": (0, 400)})
    write_index(folder, {"a": "../other.safetensors"})
    assert checkpoint_bytes(folder) == 0


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 400\n",
        b"",
        b"1234567",
        struct.pack("<Q", 9) + b'{"a": 1}',
        struct.pack("<Q", 10) + b'{"a": {}} ',
        struct.pack("<Q", 28) + b'{"a": {"data_offsets": [1]}}',
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"\xff\xfe[]",
    ],
)
def test_what_is_no_such_file_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert checkpoint_bytes(tmp_path) == 0


@pytest.mark.parametrize("content", ["[]", "{", '{"metadata": [], "weight_map": 3}', "{}"])
def test_an_index_that_says_nothing_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert checkpoint_bytes(tmp_path) == 0
