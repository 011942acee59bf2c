"""Import operator profiles in LLMServingSim's layout.

`perf/<hardware>/<org>/<model>/<dtype>/tp<N>/*.csv` next to a `meta.yaml`, in µs of one layer under
vLLM; the rows have no dimensions, those follow from the model and the degree. `collectives/*.csv`
have message sizes in elements. Source: https://github.com/casys-kaist/LLMServingSim, profiler/.
"""

from foretoken.catalog.importers.llmservingsim.collective_file import (
    find_collective_files,
    read_collectives,
)
from foretoken.catalog.importers.llmservingsim.layer_files import read_layers
from foretoken.catalog.importers.llmservingsim.variant import find_variants
from foretoken.catalog.importing import (
    Importer,
    ImportNotes,
    ImportPlan,
    ImportRequest,
    build_plan,
)


def _load(request: ImportRequest) -> ImportPlan:
    notes = ImportNotes()
    variants = find_variants(request)
    tables = [found for variant in variants for found in read_layers(variant, notes)]
    tables += [
        read_collectives(path, request, notes) for path in find_collective_files(request.path)
    ]
    sources = [variant.meta_file for variant in variants] + [origin.source for origin, _ in tables]
    environment = {
        f"{variant.hardware}/{variant.model.name}/{key}": value
        for variant in variants
        for key, value in variant.environment.items()
    }
    return build_plan(
        "llmservingsim",
        request,
        sources,
        [rows for _, rows in tables],
        notes=notes,
        environment=environment,
    )


IMPORTER = Importer(
    name="llmservingsim",
    summary="LLMServingSim's profiler/perf folder, or one above it that also has collectives/",
    load=_load,
)
