"""The page shows what a check found, stands alone, and trusts no text."""

from html import escape
from pathlib import Path

from catalog_rows import batches, run, table
from page_structure import charts_of, check_self_contained
from quality_rows import EVERYTHING, check, residual_adds

from foretoken.catalog.quality.page import write_quality_page
from foretoken.catalog.service import CatalogService
from foretoken.domain.measurements.measurement import QualityReport, RunKind


def _write(catalog: CatalogService, path: Path) -> str:
    write_quality_page(check(catalog), catalog.read_measurements(EVERYTHING), path)
    return path.read_text(encoding="utf-8")


def test_the_page_has_numbers_reasons_and_a_picture(
    catalog: CatalogService, tmp_path: Path
) -> None:
    rows = residual_adds(slip=10_000, kernel="<script>alert(1)</script>", source_file="a&b.csv")
    list(catalog.record(run(kind=RunKind.IMPORT), batches(table(*rows))))
    page = _write(catalog, tmp_path / "page.html")
    assert "<dt>rows judged</dt><dd>20</dd>" in page
    assert "<dt>flagged</dt><dd>1</dd>" in page
    assert "residual_add forward on a30 · vllm" in page
    assert "1 of 20: local_outlier, 2 times what its neighbours suggest" in page
    assert "more than 1.5 times off its neighbours along every dimension" in page
    assert [
        "Overview",
        "residual_add forward on a30 · vllm · &lt;script&gt;alert(1)&lt;/script&gt;",
    ] == [escape(title) for title in charts_of(page)]
    assert "not flagged (19)" in page
    assert "local_outlier (1)" in page


def test_text_of_files_is_escaped_and_nothing_is_fetched(
    catalog: CatalogService, tmp_path: Path
) -> None:
    rows = residual_adds(slip=10_000, kernel="<script>alert(1)</script>", source_file="a&b.csv")
    list(catalog.record(run(kind=RunKind.IMPORT), batches(table(*rows))))
    page = _write(catalog, tmp_path / "page.html")
    check_self_contained(page)
    assert "a&amp;b.csv" in page


def test_flags_of_others_may_say_anything(catalog: CatalogService, tmp_path: Path) -> None:
    """A sender's own flag is no formula and no markup."""
    rows = residual_adds()
    rows[3]["flags"] = ["$x^{<b>$: odd"]
    list(catalog.record(run(kind=RunKind.IMPORT), batches(table(*rows))))
    page = _write(catalog, tmp_path / "page.html")
    assert "$x^{&lt;b&gt;$" in page
    assert "<b>" not in page


def test_every_group_has_its_chart(catalog: CatalogService, tmp_path: Path) -> None:
    rows = [*residual_adds(slip=10_000), *residual_adds(slip=5000, kernel="other")]
    list(catalog.record(run(kind=RunKind.IMPORT), batches(table(*rows))))
    assert 3 == len(charts_of(_write(catalog, tmp_path / "page.html")))


def test_a_clean_catalog_has_a_page_too(catalog: CatalogService, tmp_path: Path) -> None:
    list(catalog.record(run(kind=RunKind.IMPORT), batches(table(*residual_adds()))))
    page = _write(catalog, tmp_path / "page.html")
    assert "No row is flagged." in page
    assert {} == charts_of(page)


def test_rows_of_a_group_may_be_gone(catalog: CatalogService, tmp_path: Path) -> None:
    """They were deleted between the check and the page: the table says what there was."""
    list(catalog.record(run(kind=RunKind.IMPORT), batches(table(*residual_adds(slip=10_000)))))
    report = check(catalog)
    with catalog._store.transaction() as cursor:
        cursor.execute("DELETE FROM measurement")
    path = tmp_path / "page.html"
    write_quality_page(report, catalog.read_measurements(EVERYTHING), path)
    assert ["Overview"] == list(charts_of(path.read_text(encoding="utf-8")))


def test_an_empty_report_needs_no_rows(catalog: CatalogService, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_quality_page(QualityReport(), catalog.read_measurements(EVERYTHING), path)
    assert "No row is flagged." in path.read_text(encoding="utf-8")
