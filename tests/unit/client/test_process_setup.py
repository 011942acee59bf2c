"""What our processes set: one thread of libraries unless somebody says more, a rare collector."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from foretoken.jobs.process_setup import ONE_THREAD, collect_rarely, use_one_thread


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = gc.get_threshold()
    for name in ONE_THREAD:
        # Set before it is deleted, so that what the test leaves is taken away again.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    gc.set_threshold(*before)


def test_libraries_have_one_thread_where_nothing_is_said() -> None:
    use_one_thread()

    assert ONE_THREAD == {name: os.environ.get(name) for name in ONE_THREAD}


@pytest.mark.parametrize("name", sorted(ONE_THREAD))
def test_who_says_how_many_threads_is_obeyed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "3")

    use_one_thread()

    assert {name: "3"} == {each: os.environ[each] for each in ONE_THREAD if each in os.environ}


@pytest.mark.parametrize(("said", "pool"), [("", "system"), ("mimalloc", "mimalloc")])
def test_arrow_gives_memory_back_unless_another_allocator_is_named(said: str, pool: str) -> None:
    name = "ARROW_DEFAULT_MEMORY_POOL"
    own = {key: value for key, value in os.environ.items() if key != name}
    code = (
        "from foretoken.jobs.process_setup import return_memory; return_memory();"
        "import pyarrow; print(pyarrow.default_memory_pool().backend_name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=own | ({name: said} if said else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert pool == done.stdout.strip()


def test_objects_are_looked_for_after_many_were_made() -> None:
    # Commands that ran in this process before have set it already.
    gc.set_threshold(700, 10, 10)

    collect_rarely()

    assert gc.get_threshold()[0] > 10 * 700
    assert gc.isenabled()
