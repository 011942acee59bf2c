"""`simulate training`: who sends how much to whom, as a table and as a picture."""

import csv
from pathlib import Path

from typer.testing import CliRunner

from foretoken.app.cli.main import app

_SCENARIO = """\
model: tiny-llama
device: a100_sxm_80
layout: {dp: 2, pp: 2}
sequence_length: 128
global_batch_size: 4
"""


def test_traffic_is_written_as_a_table_and_as_a_heat_map(tmp_path: Path) -> None:
    """Two micro batches of 128 tokens of 512 features in two bytes go over each boundary."""
    scenario, table = tmp_path / "small.yaml", tmp_path / "traffic.csv"
    picture = tmp_path / "traffic.svg"
    scenario.write_text(_SCENARIO)
    words = [
        *("--home", tmp_path / "home", "simulate", "training", scenario),
        *("--table", f"traffic={table}", "--heat-map", picture),
    ]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    with table.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["axis"] == "pp"]
    sent = {(row["source"], row["target"]): float(row["bytes"]) for row in rows}
    for pair in (("0", "2"), ("2", "0"), ("1", "3"), ("3", "1")):
        # Beside them go the four bytes of a norm that all agree on.
        assert 0 <= sent[pair] - 2 * 128 * 512 * 2 < 100
    assert "sending device" in picture.read_text(encoding="utf-8")
