"""What the parts of names of deployments and strategies stand for, where the names are shown."""

import re
from collections.abc import Iterable, Mapping

# In the order of names; a number follows each.
_TERMS: Mapping[str, str] = {
    "tp": "tensor parallel: each layer is split over so many GPUs",
    "pp": "pipeline parallel: the layers are cut into so many stages",
    "vpp": "chunks of layers of each stage, run in turn",
    "dp": "data parallel: so many copies share the requests, or the batch",
    "cp": "context parallel: each sequence is split over so many GPUs",
    "ep": "expert parallel: the experts are spread over so many GPUs",
    "wp": "weight parallel: the weights are spread over so many GPUs",
    "b": "requests that run on a replica at once",
    "c": "tokens of a step at most",
    "mbs": "sequences of a micro batch",
    "gbs": "sequences of a step, all GPUs together",
    "zero": "ZeRO stage: what of the optimizer, gradients and weights is spread",
}
_PART = re.compile(r"\b([a-z]+)\d+\b")


def explain_names(names: Iterable[str]) -> str:
    """Return what the parts of names stand for, in a line; empty where there are none.

    `2 x tp4 b64`: two replicas of four GPUs each.
    """
    found = {part for name in names for part in _PART.findall(name)}
    terms = [f"`{part}` {term}" for part, term in _TERMS.items() if part in found]
    return "; ".join(terms) + "." if terms else ""
