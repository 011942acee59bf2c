"""Charts as picture files."""

import subprocess
import sys
from pathlib import Path

import pytest

from foretoken.page.block import Chart, Column, Table
from foretoken.page.chart import Plot
from foretoken.page.curve import Curve, draw_curves
from foretoken.page.picture import write_picture

_X, _Y = Column(title="tokens"), Column(title="time (ms)")


def _lines(title: str) -> Chart:
    curves = [
        Curve(label="fitted", x=[1, 2], y=[3.0, 4.0], low=[2.0, 3.0], high=[4.0, 5.0]),
        Curve(label="measured", x=[1, 2], y=[3.5, 4.5]),
    ]
    return draw_curves(Plot(title=title), curves, x=_X, y=_Y)


@pytest.mark.parametrize(
    ("ending", "begins"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<svg")]
)
def test_a_picture_has_the_format_of_its_ending(tmp_path: Path, ending: str, begins: bytes) -> None:
    path = tmp_path / f"picture{ending}"
    write_picture(path, [_lines("times")])
    assert path.read_bytes().startswith(begins)


def test_several_charts_are_one_picture(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    write_picture(path, [_lines("first"), _lines("second")])
    written = path.read_text(encoding="utf-8")
    for word in ("first", "second", "fitted", "measured", "time (ms)"):
        assert word in written


def test_numbers_of_a_heat_map_stand_in_their_order(tmp_path: Path) -> None:
    columns = [Column(title="to"), Column(title="from"), Column(title="GiB")]
    rows = [(16, 0, 1.0), (8, 8, 1.0), (0, 16, 1000.0)]
    plot = Plot(title="", table=Table(columns=columns, rows=rows), x="to", y="from")
    path = tmp_path / "map.svg"
    chart = plot.heat_map("GiB")
    write_picture(path, [chart])
    written = path.read_text(encoding="utf-8")
    labels = [written.index(f">{number}</text>") for number in (0, 8, 16)]
    assert labels == sorted(labels)
    # Values that span three decades are coloured by their logarithms.
    assert chart.spec["layer"][0]["encoding"]["color"]["scale"]["type"] == "log"


@pytest.mark.slow
def test_without_the_package_a_picture_is_refused_with_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['vl_convert'] = None\n"
        "from foretoken.app.cli.main import main\n"
        "main()"
    )
    words = ["profile", "collectives", "--picture", str(tmp_path / "picture.svg")]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "pip install 'foretoken[pictures]'" in " ".join(done.stderr.split())
