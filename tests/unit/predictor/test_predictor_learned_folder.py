"""What was learned is removed when nobody reads it any more, and made anew if asked for again."""

import os
import time
from pathlib import Path

from foretoken.predictor.learned_folder import LearnedFolder

DAY_S = 86_400.0
NOW_S = time.time()


def _age(folder: LearnedFolder, name: str, days: float) -> None:
    at_s = NOW_S - days * DAY_S
    os.utime(folder.path / name, (at_s, at_s))


def test_what_nobody_read_for_a_week_is_removed_when_more_is_kept(tmp_path: Path) -> None:
    folder = LearnedFolder(tmp_path, lambda: NOW_S)
    for name in ("aa", "bb"):
        folder.keep(name, b"model")
    _age(folder, "aa.series", 8.0)
    _age(folder, "bb.series", 6.0)
    assert ["aa", "bb"] == sorted(folder)
    folder.keep("cc", b"model")
    assert ["bb", "cc"] == sorted(folder)


def test_what_was_read_stays_for_another_week(tmp_path: Path) -> None:
    """Also where another process keeps something."""
    folder = LearnedFolder(tmp_path, lambda: NOW_S)
    folder.keep("aa", b"model")
    _age(folder, "aa.series", 8.0)
    assert b"model" == folder["aa"]
    LearnedFolder(tmp_path, lambda: NOW_S + 6.0 * DAY_S).keep("bb", b"model")
    assert ["aa", "bb"] == sorted(folder)


def test_what_other_releases_learned_is_removed_as_well(tmp_path: Path) -> None:
    folder = LearnedFolder(tmp_path, lambda: NOW_S)
    old = tmp_path / "1-1" / "aa.series"
    old.parent.mkdir()
    old.write_bytes(b"model of an earlier release")
    os.utime(old, (NOW_S - 8.0 * DAY_S, NOW_S - 8.0 * DAY_S))
    folder.keep("bb", b"model")
    assert not old.exists()
