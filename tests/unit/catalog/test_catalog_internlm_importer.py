"""The InternLM simulator's curves become rows; nothing in the file is run."""

import os
import pickle
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from import_plans import list_rows

from foretoken.catalog.importers.internlm.curves import Call, Global, read_pickle
from foretoken.catalog.importing import ImportPlan, ImportRequest, find_importer
from foretoken.catalog.service import CatalogService
from foretoken.domain.errors import InvalidRequestError, UnknownDeviceError

_A100 = {"device": "a100_sxm_80", "topology": "a100_dgx"}


def _curve(x: list[float], y: list[float]) -> Any:
    interpolate = pytest.importorskip("scipy.interpolate", reason="scipy writes the file to read")
    return interpolate.interp1d(np.array(x, dtype=float), np.array(y), kind="slinear")


def _write(folder: Path, content: bytes, *, is_zip: bool = True) -> Path:
    path = folder / "data.pt"
    if is_zip:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data/data.pkl", content)
            archive.writestr("data/version", "3\n")
    else:
        path.write_bytes(content)
    return path


def _read(path: Path, **changes: Any) -> ImportPlan:
    return find_importer("internlm").read(ImportRequest(path=path, **{**_A100, **changes}))


def _read_curves(
    folder: Path, curves: Mapping[str, tuple[list[float], list[float]]], **changes: Any
) -> list[dict[str, Any]]:
    content = pickle.dumps({name: _curve(*points) for name, points in curves.items()}, protocol=2)
    return list_rows(_read(_write(folder, content), **changes))


def test_work_of_a_linear_layer_says_its_shape(tmp_path: Path) -> None:
    """Of shapes with equal work the profiler measured the one with the shortest sequence."""
    work = [2.0 * 512 * 512**2, 2.0 * 2048 * 512**2, 2.0 * 4096 * 5120**2]
    rows = _read_curves(tmp_path, {"linear": (work, [1e12, 2e12, 4e12])})
    assert [(512, 512, 512), (512, 1024, 1024), (1024, 10240, 10240)] == [
        tuple(row["dims"].values()) for row in rows
    ]
    times = [flop / speed * 1e6 for flop, speed in zip(work, (1e12, 2e12, 4e12), strict=True)]
    assert pytest.approx(times) == [row["latency_us_median"] for row in rows]
    assert {("gemm", "bf16", "a100_sxm_80", None)} == {
        (row["operator"], row["dtype"], row["device"], row["topology"]) for row in rows
    }


def test_a_layer_of_another_size_needs_its_width(tmp_path: Path) -> None:
    curves = {"linear": ([2.0 * 100 * 768**2, 2.0 * 512 * 512**2], [1e12, 1e12])}
    assert [512] == [row["dims"]["m"] for row in _read_curves(tmp_path, curves)]
    assert any("1 points of linear are left out" in note for note in _read(tmp_path).notes)
    rows = _read_curves(tmp_path, curves, options={"hidden": "768"})
    assert [(100, 768, 768)] == [tuple(row["dims"].values()) for row in rows]


@pytest.mark.parametrize(
    ("op", "operator", "message_bytes"),
    [
        ("all2all", "all_to_all", 4096),
        ("all_gather", "all_gather", 4096),
        ("reduce_scatter", "reduce_scatter", 4096),
        ("all_reduce", "all_reduce", 2048),
    ],
)
def test_a_collective_has_bytes_and_a_group(
    op: str, operator: str, message_bytes: int, tmp_path: Path
) -> None:
    """The bytes of an all-reduce are counted twice in the file."""
    curve = ([4096.0, 8192.0], [1e9, 2e9])
    row, _ = _read_curves(tmp_path, {f"{op}_intra_8_inter_2": curve})
    dims = {"message_bytes": message_bytes, "devices_per_node": 8, "num_nodes": 2}
    assert (operator, dims) == (row["operator"], row["dims"])
    assert pytest.approx(4.096) == row["latency_us_median"]
    assert ("a100_dgx", 1) == (row["topology"], row["source_row"])


def test_curves_without_an_operator_are_left_out(tmp_path: Path) -> None:
    curve = ([2.0**28, 2.0**29], [1e9, 1e9])
    names = ("linear", "broadcast_intra_8_inter_1", "flash_attn", "linear_intra_2_inter_1")
    rows = _read_curves(tmp_path, dict.fromkeys(names, curve))
    assert {"gemm"} == {row["operator"] for row in rows}
    left_out = [note.split("named ")[1].split()[0] for note in _read(tmp_path).notes]
    assert ["broadcast", "flash_attn", "linear"] == left_out


def test_out_of_memory_is_a_failed_row(tmp_path: Path) -> None:
    """The profiler writes a time of a billion seconds."""
    work = 2.0 * 512 * 512**2
    rows = _read_curves(tmp_path, {"linear": ([work, 2 * work], [1e12, 2 * work / 1e9])})
    assert ["ok", "failed"] == [row["status"] for row in rows]


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("is_zip", [True, False], ids=["torch", "plain"])
def test_a_pickle_is_read_with_and_without_its_archive(
    protocol: int, is_zip: bool, tmp_path: Path
) -> None:
    content = pickle.dumps({"linear": _curve([2.0**28, 2.0**29], [1e12, 1e12])}, protocol)
    path = _write(tmp_path, content, is_zip=is_zip)
    assert 2 == _read(path).num_rows == _read(tmp_path).num_rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": ""}, "device: the file does not say it"),
        ({"topology": ""}, "topology: the file does not say it"),
        ({"topology": "h100_dgx"}, "h100_dgx is made of h100_sxm"),
        ({"options": {"hidden": "wide"}}, "options.hidden"),
        ({"options": {"hidden": "0"}}, "options.hidden"),
    ],
)
def test_what_the_file_does_not_say_is_asked(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _read(tmp_path, **changes)


def test_an_unknown_device_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnknownDeviceError):
        _read(tmp_path, device="a1000")


class _Call:
    """Pickles as a call of any function with any arguments."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._made_of = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._made_of


def _nested(depth: int) -> bytes:
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


_ATTACKS = {
    "system": pickle.dumps({"linear": _Call(os.system, "touch pwned")}, 2),
    "eval": pickle.dumps(_Call(eval, "open('pwned', 'w')"), 4),
    "getattr_chain": pickle.dumps(_Call(getattr, _Call(__import__, "os"), "system"), 2),
    "build": b"\x80\x02cos\nsystem\n)\x81X\x05\x00\x00\x00pwned" + b"b.",
    "inst": b"(X\x0b\x00\x00\x00touch pwnedios\nsystem\n.",
    "obj": b"(cos\nsystem\nX\x0b\x00\x00\x00touch pwnedo.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent_id": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "text_persistent_id": b"\x80\x02Pabc\n.",
    "huge_bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".",
    "huge_long": b"\x80\x02\x8b" + struct.pack("<i", (1 << 31) - 1) + b"\x01.",
    "huge_text_number": b"\x80\x02L" + b"9" * 100_000 + b"L\n.",
    "huge_memo": b"\x80\x02}r\xff\xff\xff\xff.",
    "deep": _nested(100_000),
    "long": b"\x80\x02" + b"N0" * 1_000_000 + b".",
    "empty_stack": b"\x80\x020.",
    "past_the_mark": b"\x80\x02N(\x86.",
    "no_mark": b"\x80\x02t.",
    "unknown_memo": b"\x80\x02h\x05.",
    "buffer": b"\x80\x05\x97.",
    "no_end": b"\x80\x02}",
    "nothing": b"",
    "two_values": b"\x80\x02NN.",
    "no_dict": b"\x80\x02N.",
    "unhashable_key": b"\x80\x02}]Ns.",
    "list_as_call": b"\x80\x02cnumpy\nndarray\n]R.",
    "nameless_global": b"\x80\x04))\x93.",
    "no_opcode": b"\x80\x02\xfe.",
}


@pytest.mark.parametrize("content", _ATTACKS.values(), ids=_ATTACKS)
def test_a_crafted_pickle_is_refused_and_runs_nothing(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for is_zip in (True, False):
        path = _write(tmp_path, content, is_zip=is_zip)
        with pytest.raises(InvalidRequestError, match=r"data\.pt"):
            _read(path)
    assert ["data.pt"] == [found.name for found in tmp_path.iterdir()]


def test_a_self_containing_pickle_is_refused(tmp_path: Path) -> None:
    endless: dict[str, Any] = {}
    endless["linear"] = endless
    with pytest.raises(InvalidRequestError, match="linear: not an interp1d"):
        _read(_write(tmp_path, pickle.dumps(endless, 2)))


def _array(shape: tuple[int, ...], dtype: str, data: bytes, module: str = "numpy") -> bytes:
    """The pickle of `{"linear": interp1d}` whose arrays are made of these parts."""

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    numbers = b"(" + b"".join(b"J" + struct.pack("<i", size) for size in shape) + b"t"
    kind = b"c" + module.encode() + b"\ndtype\n(" + text(dtype) + b"\x89\x88tR"
    kind += b"(K\x03" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy._core.multiarray\n_reconstruct\n(tR"
    array += b"(K\x01" + numbers + kind + b"\x89" + b"B" + struct.pack("<I", len(data)) + data
    array += b"tb"
    curve = b"cscipy.interpolate._interpolate\ninterp1d\n)\x81}("
    curve += text("x") + array + text("y") + array + b"ub"
    return b"\x80\x03}" + text("linear") + curve + b"s."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_array((1 << 30,), "f8", bytes(16)), "another size than its data"),
        (_array((-1,), "f8", bytes(16)), "another size"),
        (_array((1, 2), "f8", bytes(16)), "not as many finite numbers"),
        (_array((2,), "O", bytes(16)), "neither floats nor integers"),
        (_array((2,), "V8", bytes(16)), "neither floats nor integers"),
        (_array((2,), "f8", bytes(16), "os"), "requests os.dtype"),
        (_array((2,), "f8", b"\xff" * 16), "not as many finite numbers"),
    ],
)
def test_an_array_that_lies_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        _read(_write(tmp_path, content))


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/other.pkl", b"")
    with pytest.raises(InvalidRequestError, match=r"without one data\.pkl"):
        _read(_write(tmp_path, buffer.getvalue(), is_zip=False))


def test_a_call_is_written_down() -> None:
    found = read_pickle(
        pickle.dumps(_Call(os.system, "ls"), 2), Path("a"), frozenset({"posix.system"})
    )
    assert isinstance(found, Call)
    assert (Global("posix", "system"), ("ls",)) == (found.function, found.arguments)


def test_every_curve_of_the_file_is_read(catalog: CatalogService, shared_data: Path) -> None:
    """19 groups of 10 sizes for 4 collectives, and 47 linear layers; broadcasts are left out."""
    plan = _read(shared_data / "internlm")
    assert 807 == sum(receipt.num_rows for receipt in catalog.record(plan.run, plan.batches))
    expected = dict.fromkeys(("all_to_all", "all_gather", "all_reduce", "reduce_scatter"), 190)
    assert {"gemm": 47, **expected} == Counter(row["operator"] for row in list_rows(plan))
    messages = {
        (row["operator"], row["dims"]["message_bytes"])
        for row in list_rows(plan)
        if row["operator"] != "gemm"
    }
    sizes = {size for operator, size in messages if operator == "all_reduce"}
    assert sizes == {size for operator, size in messages if operator == "all_gather"}
