"""Results that a catalog keeps of simulations and searches, for asyncio."""

from foretoken.client.results import describe_results, pick_result, unpack_result
from foretoken.client.services import AsyncCatalogClient
from foretoken.domain.results.result import RESULT_ARTIFACT, AnyReport, KeptResult
from foretoken.wire.result_file import label_file


async def list_results(catalog: AsyncCatalogClient) -> tuple[KeptResult, ...]:
    """Return what is known of the kept results, newest first; what is damaged is left out."""
    return describe_results(await catalog.list_artifacts(RESULT_ARTIFACT))


async def find_result(catalog: AsyncCatalogClient, name: str) -> KeptResult:
    """Return the result of a name; see `foretoken.client.results.find_result`."""
    return pick_result(await list_results(catalog), name)


async def read_result(catalog: AsyncCatalogClient, name: str) -> tuple[KeptResult, AnyReport]:
    """Return a result with its report, all of its columns in it; `name` as in `find_result`."""
    result = await find_result(catalog, name)
    return result, unpack_result(await _read(catalog, result), result)


async def export_result(catalog: AsyncCatalogClient, name: str) -> bytes:
    """Return the content of a file that `open_result` reads; `name` as in `find_result`."""
    result = await find_result(catalog, name)
    return label_file(await _read(catalog, result), result)


async def delete_result(catalog: AsyncCatalogClient, name: str) -> KeptResult:
    """Forget a result, and return what was known of it; `name` as in `find_result`."""
    result = await find_result(catalog, name)
    await catalog.delete_artifact(RESULT_ARTIFACT, result.job_id)
    return result


async def _read(catalog: AsyncCatalogClient, result: KeptResult) -> bytes:
    pieces = [piece async for piece in catalog.read_artifact(RESULT_ARTIFACT, result.job_id)]
    return b"".join(pieces)
