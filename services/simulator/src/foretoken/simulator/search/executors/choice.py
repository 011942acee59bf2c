"""Choose where the tasks of searches run."""

from foretoken.domain.errors import InvalidRequestError
from foretoken.simulator.search.executor import Executor
from foretoken.simulator.search.executors.local import LocalExecutor


def open_executor(ray_address: str = "", num_workers: int = 0) -> Executor:
    """Return workers on the Ray cluster of an address, or processes of this machine without one.

    `num_workers` 0: as many as there are cores. The processes start with the first run.

    Raises:
        InvalidRequestError: Ray is not installed.
        ServiceUnavailableError: nothing answers at the address.

    """
    if not ray_address:
        return LocalExecutor(num_workers)
    try:
        from foretoken.simulator.search.executors.ray import RayExecutor
    except ModuleNotFoundError as err:
        raise InvalidRequestError.of_field(
            "simulator.ray_address",
            f"{ray_address!r} needs {err.name}: pip install 'foretoken[search]', or leave it empty"
            " to search with processes of this machine",
        ) from err
    executor = RayExecutor(ray_address, num_workers)
    executor.open()
    return executor
