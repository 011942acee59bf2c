"""What imports and exports say of rows and files they leave out."""

from pathlib import Path

import pytest

from foretoken.catalog.exporting import LeftOut
from foretoken.catalog.importing import ImportNotes, ImportRequest, find_importer
from foretoken.domain.errors import InvalidRequestError


def test_rows_left_out_are_counted_by_reason_and_by_what_they_measure() -> None:
    """Each reason is one line with its total; what has most rows comes first, none is not named."""
    left_out = LeftOut()
    left_out.add("no table holds such", "rope", 12)
    left_out.add("failed", "gemm", 3)
    left_out.add("no table holds such", "silu_mul", 1000)
    left_out.add("no table holds such", "rope", 1)
    left_out.add("of no model", "gemm", 0)
    assert (
        "1,013 rows left out, no table holds such: silu_mul 1,000, rope 13",
        "3 rows left out, failed: gemm 3",
    ) == left_out.lines()


def test_a_remark_counts_the_files_it_is_about() -> None:
    """A remark made for each row of a file counts the file once."""
    notes = ImportNotes()
    for place in ("a.csv", "a.csv", "b.csv", "a.csv"):
        notes.add(place, "times are flagged")
    notes.add("a.csv", "ends early")
    assert ("a.csv and 1 more: times are flagged", "a.csv: ends early") == notes.lines()


def test_an_import_that_finds_nothing_says_what_it_read_past_and_what_it_looked_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "wideep_moe_perf.csv").write_text("a,b\n")
    request = ImportRequest(path=tmp_path, device="l40s")
    with pytest.raises(InvalidRequestError) as caught:
        find_importer("aiconfigurator").read(request)
    message = caught.value.message
    assert "wideep_moe_perf.csv: wideep_moe_perf: no operator here is what it measured" in message
    assert "no file with rows in this format (AIConfigurator's systems folder" in message
    assert message.endswith(" of l40s")
