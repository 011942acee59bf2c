"""Compile the engine once before the workers of a search need it, each of them."""

from collections.abc import Callable

from foretoken.domain.frameworks.engine import DEFAULT_PROFILE, find_engine
from foretoken.simulator.engine.pool import EnginePool
from foretoken.simulator.engine.simulation import is_ready
from foretoken.simulator.search.executor import Executor
from foretoken.simulator.serving.setup import DeploymentSetup
from foretoken.simulator.serving.simulation import compile_engines


def must_compile() -> bool:
    """Whether no process of this machine has compiled the engine, and pools of it, yet."""
    setup = DeploymentSetup(profile=find_engine(DEFAULT_PROFILE), num_kv_blocks=1)
    return not (is_ready(setup) and EnginePool.is_ready(setup))


def compile_in_worker(executor: Executor, check: Callable[[], None]) -> None:
    """Let one worker compile what the others load; `check` as of `Executor.run`.

    Not this process, whose other threads would wait meanwhile.
    """
    list(executor.run(_compile, (0,), None, check))


def _compile(_item: int, _shared: None) -> None:
    compile_engines()
