"""Choose where tasks run."""

from foretoken.domain.errors import InvalidRequestError
from foretoken.jobs.executor import Executor
from foretoken.jobs.executors.local import LocalExecutor


def open_executor(
    ray_address: str = "", num_workers: int = 0, *, field: str = "ray_address"
) -> Executor:
    """Return workers on the Ray cluster of an address, or processes of this machine without one.

    `num_workers` 0: as many as there are cores. The processes start with the first run. `field` is
    the key of a configuration that errors name.

    Raises:
        InvalidRequestError: Ray is not installed.
        ServiceUnavailableError: nothing answers at the address.

    """
    if not ray_address:
        return LocalExecutor(num_workers)
    try:
        from foretoken.jobs.executors.ray import RayExecutor
    except ModuleNotFoundError as err:
        raise InvalidRequestError.of_field(
            field,
            f"{ray_address!r} needs {err.name}: pip install 'foretoken[search]', or leave it empty"
            " for processes of this machine",
        ) from err
    executor = RayExecutor(ray_address, num_workers)
    executor.open()
    return executor
