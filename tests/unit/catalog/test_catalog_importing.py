"""Importers are found, check their request, and give the same files the same run."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from catalog_rows import gemms

from foretoken.catalog.importing import (
    Importer,
    ImportNotes,
    ImportPlan,
    ImportRequest,
    all_importers,
    build_plan,
    find_importer,
    name_model,
)
from foretoken.catalog.sources.file import SourceFile
from foretoken.domain.errors import InvalidRequestError, UnknownPluginError

_FILE = SourceFile("a.csv", "abc", b"")


def _plan(request: ImportRequest, source: SourceFile = _FILE, num_rows: int = 2) -> ImportPlan:
    tables = [gemms(range(1, num_rows + 1)), gemms([])]
    return build_plan("tool", request, [source], tables, notes=ImportNotes())


def test_importers_are_found_by_name() -> None:
    assert {"vidur", "llmservingsim"} <= set(all_importers())
    with pytest.raises(UnknownPluginError, match="did you mean vidur"):
        find_importer("vidor")


def test_an_option_nobody_knows_and_a_path_that_is_not_there_are_said(tmp_path: Path) -> None:
    importer = Importer(name="x", summary="", load=_plan, options={"folder": "which"})
    request = ImportRequest(path=tmp_path / "nowhere", options={"foldr": "a"})
    with pytest.raises(InvalidRequestError, match=r"options.foldr.*folder.*path.*not exist"):
        importer.read(request)


def test_the_last_batch_says_so_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    plan = _plan(ImportRequest(path=tmp_path))
    assert [(0, True, 2)] == [(b.batch_index, b.is_last, plan.num_rows) for b in plan.batches]


def test_nothing_to_import_is_an_error_with_the_notes(tmp_path: Path) -> None:
    notes = ImportNotes()
    notes.add("a.csv", "not known here")
    with pytest.raises(InvalidRequestError, match=r"nothing to import.*a.csv: not known here"):
        build_plan("tool", ImportRequest(path=tmp_path), [_FILE], [gemms([])], notes=notes)


def test_the_run_follows_from_the_files_wherever_they_lie(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    first, second = (_plan(ImportRequest(path=p)).run for p in (tmp_path, tmp_path / "copy"))
    assert first == second


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        (SourceFile("a.csv", "abd", b""), {}),
        (SourceFile("b.csv", "abc", b""), {}),
        (_FILE, {"device": "a30"}),
        (_FILE, {"model": "m"}),
        (_FILE, {"options": {"licence": "MIT"}}),
    ],
)
def test_other_files_or_parameters_are_another_run(
    source: SourceFile, changes: Mapping[str, object], tmp_path: Path
) -> None:
    plain = _plan(ImportRequest(path=tmp_path)).run
    changed = _plan(ImportRequest(path=tmp_path, **changes), source).run
    assert plain.run_id != changed.run_id


def test_how_much_may_be_read_is_no_part_of_the_run(tmp_path: Path) -> None:
    plain, limited = (
        _plan(ImportRequest(path=tmp_path, options=options)).run
        for options in ({}, {"max_bytes": "1000"})
    )
    assert plain == limited


@pytest.mark.parametrize(
    ("own_name", "expected"),
    [("meta-llama/Llama-3.1-8B", "llama-3.1-8b"), ("Org/Nobody-7B", "Org/Nobody-7B")],
)
def test_a_model_goes_by_its_preset_where_there_is_one(own_name: str, expected: str) -> None:
    assert expected == name_model(own_name)


def test_what_the_caller_knows_of_the_source_is_kept(tmp_path: Path) -> None:
    options = {"source": "a paper", "licence": "MIT"}
    run = _plan(ImportRequest(path=tmp_path, options=options)).run
    assert ("a paper", "MIT") == (run.source, run.licence)


def test_the_same_remark_is_made_once() -> None:
    notes = ImportNotes()
    for place in ("a", "b", "c"):
        notes.add(place, "old")
    notes.add("a", "new")
    assert ("a and 2 more: old", "a: new") == notes.lines()
