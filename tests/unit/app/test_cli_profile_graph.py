"""`foretoken profile graph`: what it writes is read back as it was."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from foretoken.app.cli.main import app
from foretoken.app.cli.profile_model import fasop_table, graph_table, write_profiles
from foretoken.app.module_times_file import read_module_times
from foretoken.catalog.importers.fasop.columns import COLUMNS
from foretoken.domain.errors import InvalidRequestError
from foretoken.domain.measurements.estimate import DType
from foretoken.domain.measurements.profiling import GraphReport
from foretoken.domain.measurements.training_truth import ModuleTime, ModuleTimes

_GATED = tuple(column.name for column in COLUMNS)
_CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2}


def _profile(modules: tuple[str, ...] = _GATED, tp: int = 1, **facts: object) -> ModuleTimes:
    """Return a profile of micro batches of 1 and 2; a module takes 1000 us more than the last."""
    times = tuple(
        ModuleTime(
            module=module,
            micro_batch_size=size,
            forward_us=1000.0 * (place + 1) * size,
            backward_us=2000.0 * (place + 1) * size,
            is_whole=module == "lm_head" and tp > 1,
        )
        for size in (1, 2)
        for place, module in enumerate(modules)
    )
    plain = ModuleTimes(
        source="graph of tiny",
        model="tiny",
        device="cpu",
        tp=tp,
        sequence_length=8,
        dtype=DType.FP32,
        measures="intervals",
        times=times,
    )
    return dataclasses.replace(plain, **facts)  # type: ignore[arg-type]


def _report(*profiles: ModuleTimes) -> GraphReport:
    return GraphReport(
        run_id="graph-cpu-tiny",
        device="cpu",
        model="tiny",
        num_layers=4,
        num_layers_timed=2,
        num_nodes=138,
        profiles=profiles,
        notes=("2 of 4 layers were built",),
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_own_profiles_round_trip(tp: int, tmp_path: Path) -> None:
    """The JSON is read back as the profile that was written, backward times included."""
    profile = _profile(tp=tp)
    write_profiles(_report(profile), _CONFIG, tmp_path)
    assert profile == read_module_times(tmp_path / f"tiny_CPU_{tp}.json", {})


def test_a_model_of_a_hostile_name_is_not_written_elsewhere(tmp_path: Path) -> None:
    """The report may come from another machine's service or catalog."""
    folder = tmp_path / "below" / "out"
    profile = dataclasses.replace(_profile(), model="../../climbed")
    with pytest.raises(InvalidRequestError, match=r"out: .* leads out of its folder"):
        write_profiles(_report(profile), _CONFIG, folder)
    assert [folder.parent, folder] == sorted(tmp_path.rglob("*"))


def test_tables_round_trip(tmp_path: Path) -> None:
    """FASOP's table is read back with equal forward times; what it does not say is given."""
    profile = _profile()
    write_profiles(_report(profile), _CONFIG, tmp_path)
    facts = {"device": "cpu", "sequence_length": 8, "dtype": "fp32"}
    read = read_module_times(tmp_path / "tiny_CPU_1.npz", facts)
    assert ("tiny", "cpu", 1, "intervals") == (read.model, read.device, read.tp, read.measures)
    expected = [(item.module, item.micro_batch_size, item.forward_us) for item in profile.times]
    found = [(item.module, item.micro_batch_size, item.forward_us) for item in read.times]
    assert sorted(expected) == sorted(found)


def test_table_layout(tmp_path: Path) -> None:
    """A table is one array `data` of ms: a row per micro batch, ten columns in FASOP's order."""
    write_profiles(_report(_profile()), _CONFIG, tmp_path)
    with np.load(tmp_path / "tiny_CPU_1.npz", allow_pickle=False) as content:
        assert ["data"] == content.files
        data = content["data"]
    assert (2, 10) == data.shape
    assert np.float64 == data.dtype
    expected = [[size * (place + 1.0) for place in range(10)] for size in (1, 2)]
    assert expected == data.tolist()


def test_fused_projections_are_shared() -> None:
    """Queries, keys and values take their widths' share; what a model has not takes no time."""
    modules = ("embed", "qkv_proj", "attn_o", "mlp_up", "mlp_down", "lm_head")
    table, reason = fasop_table(_profile(modules), _CONFIG)
    assert "" == reason
    first = dict(zip(_GATED, table[0].tolist(), strict=True))
    assert (1.0, 0.5, 0.5) == (first["attn_q"], first["attn_k"], first["attn_v"])
    assert (0.0, 0.0, 4.0) == (first["mlp_gate"], first["mlp_act_fn"], first["mlp_up"])


def test_layers_that_differ_count_by_their_mean() -> None:
    """A table has one value for all layers."""
    times = tuple(
        dataclasses.replace(item, layer=layer, forward_us=item.forward_us * (layer + 1))
        for item in _profile().times
        for layer in (0, 1)
    )
    table, _ = fasop_table(_profile(times=times), _CONFIG)
    assert [1.5, 3.0] == table[0, :2].tolist()


@pytest.mark.parametrize(
    ("modules", "what"),
    [
        (("embed", "attn_q", "attn_k", "attn_v", "attn_o", "mlp", "lm_head"), "no column for mlp"),
        (("embed", "layer", "lm_head"), "no column for layer"),
        (("embed", "attn_q", "attn_o", "mlp_up", "mlp_down", "lm_head"), "no attn_k, attn_v"),
    ],
)
def test_what_fasop_has_no_columns_for(modules: tuple[str, ...], what: str, tmp_path: Path) -> None:
    """A model with other modules has no table, which is told, but a profile of its own."""
    lines = write_profiles(_report(_profile(modules)), _CONFIG, tmp_path)
    assert any(what in line for line in lines)
    assert ["tiny_CPU_1.json"] == [path.name for path in tmp_path.iterdir()]


def test_nothing_to_write(tmp_path: Path) -> None:
    """Without a profile nothing is written, and that is said."""
    lines = write_profiles(_report(), _CONFIG, tmp_path / "new")
    assert ["no profile came of it: nothing is written"] == lines


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    """A file in the folder's place is an error that names it."""
    taken = tmp_path / "taken"
    taken.write_text("", encoding="utf-8")
    with pytest.raises(InvalidRequestError, match="taken"):
        write_profiles(_report(_profile()), _CONFIG, taken)


def test_the_table_shows_both_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """A cell has the ms of both passes; notes follow the tables."""
    Console(width=200).print(graph_table(_report(_profile())))
    shown = capsys.readouterr().out
    assert "attn_q" in shown
    assert "2 / 4" in shown
    assert "each of 4" in shown
    assert "- 2 of 4 layers were built" in shown


@pytest.mark.parametrize("text", ["0", "1,x", "-1"])
def test_tensor_parallel_sizes_are_counts(text: str, tmp_path: Path) -> None:
    words = ["--home", str(tmp_path), "profile", "graph", "tiny-llama", "--tp", text]
    outcome = CliRunner().invoke(app, words)
    assert (1, True) == (outcome.exit_code, "tp" in outcome.output)


def test_a_model_that_cannot_be_split_ends_with_a_status_and_the_reason(tmp_path: Path) -> None:
    config = str(Path(__file__).resolve().parents[3] / "docs" / "examples" / "small-llama.json")
    words = ["--home", str(tmp_path), "profile", "graph", config, "--seq-len", "32", "--tp", "3"]
    outcome = CliRunner().invoke(app, words)
    assert 1 == outcome.exit_code
    assert "num_attention_heads 8 does not divide by 3" in outcome.output
