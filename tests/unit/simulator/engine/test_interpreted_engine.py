"""The engine as plain Python does what it does compiled, and takes a scheduler that is one file."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import engine_runs
import pytest

import foretoken.simulator
from foretoken.simulator import jit

_ROOT = Path(__file__).resolve().parents[4]
# Two requests that arrive together, by a scheduler of the copy.
_RUN = """
import numpy as np
from foretoken.domain.frameworks.engine import EngineProfile
from foretoken.simulator.cost.tables import flat_tables
from foretoken.simulator.serving.simulation import run_deployment
from foretoken.simulator.workload.request_plan import plan_requests
from foretoken.simulator.serving.setup import DeploymentSetup

profile = EngineProfile(name="mine", engine="mine", scheduler="one_by_one", max_num_seqs=4)
many = np.full(2, 10)
plan = plan_requests(0 * many, many, many)
setup = DeploymentSetup(profile=profile, num_kv_blocks=100)
record = run_deployment(plan, setup, flat_tables(), lambda _: None)
first, second = record.requests.finished_ns[0], record.requests.scheduled_ns[1]
print(len(record.steps[0].end_ns), record.steps[0].num_running.max(), second >= first)
"""


def _run_python(*arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **variables},
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_the_engine_interpreted_does_what_it_does_compiled() -> None:
    """Every scheduler, to the ns, where blocks are short: with tiers, swapping, drafts."""
    interpreted = json.loads(_run_python(str(Path(engine_runs.__file__)), FORETOKEN_JIT="0"))
    compiled = engine_runs.run_all()
    assert jit.IS_COMPILED
    assert sum(sum(run["RequestRecord.num_preemptions"]) for run in compiled.values()) > 0
    assert sum(sum(run["RequestRecord.num_loaded_tokens"]) for run in compiled.values()) > 0
    assert compiled == interpreted


@pytest.mark.slow
def test_a_scheduler_is_one_file(tmp_path: Path) -> None:
    """In a copy of the simulator the one of the documents serves a request after the other."""
    copy = tmp_path / "foretoken" / "simulator"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(foretoken.simulator.__path__[0], copy, ignore=ignored)
    document = (_ROOT / "docs/how-to/add-a-scheduler.md").read_text("utf-8")
    (code,) = re.findall(r"```python run\n(.*?)```", document, re.DOTALL)
    (copy / "engine/schedulers/one_by_one.py").write_text(code, "utf-8")
    assert "20 1 True" == _run_python("-c", _RUN, FORETOKEN_JIT="0", PYTHONPATH=str(tmp_path))
