"""Searches from the command line, in processes of their own, to be killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Started = subprocess.Popen[str]


def start_search(home: Path, *words: object) -> Started:
    """Start `foretoken search`, which prints its report as JSON and leads a group of processes."""
    program = (sys.executable, "-m", "foretoken.app", "--home", home, "--output", "json", "search")
    return subprocess.Popen(
        [str(word) for word in (*program, *words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish_search(process: Started) -> tuple[dict[str, Any], str]:
    """Wait for a search; return its report and its notes."""
    output, notes = process.communicate(timeout=240)
    assert process.returncode == 0, notes
    return json.loads(output), notes


def kill_in_the_middle(process: Started, home: Path) -> str:
    """Kill a search and its workers once it has simulated something; return its notes."""
    deadline = time.monotonic() + 200
    while not any(path.stat().st_size for path in (home / "simulator").glob("*.finalists.jsonl")):
        assert process.poll() is None, "it ended before anything was simulated"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    return process.communicate(timeout=30)[1]
