"""Answers kept from one question to the next, by what they rest on."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from foretoken.simulator.latency_source import LatencySource

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class KeptAnswers(Generic[K, V]):
    """The last answers used, by what they are about and the version of the models that gave them.

    Found is what rests on a version that answers now: that of the one active model, or of an answer
    just had. Of a predictor without an active model no version is known before it answers: it
    learns what the catalog measured meanwhile. What a correction changes is not kept: another may
    be learned under its name, and no list says which one a predictor remembers.
    """

    def __init__(self, predictor: LatencySource, max_kept: int) -> None:
        self._predictor = predictor
        self._max_kept = max_kept
        self._kept: OrderedDict[tuple[K, str], V] = OrderedDict()
        self._lock = threading.Lock()

    def active_version(self) -> str:
        """Return the version of the models that answer, empty where only an answer says it."""
        active = [model.version for model in self._predictor.list_models() if model.is_active]
        return active[0] if len(active) == 1 else ""

    def answer(
        self,
        keys: Sequence[K],
        ask: Callable[[Sequence[K]], tuple[Sequence[V], str]],
        correction: str = "",
        version: str | None = None,
    ) -> tuple[list[V], str]:
        """Return the answers and the version they rest on; `ask` is called once for those missing.

        `version` is of an answer just had; left out, the active model's.
        """
        if version is None:
            version = "" if correction else self.active_version()
        is_kept = bool(version) and not correction
        found = self._find(keys, version) if is_kept else {}
        missing = [key for key in keys if key not in found]
        if missing:
            answers, version = ask(missing)
            found.update(zip(missing, answers, strict=True))
            if is_kept:
                # Under the version the answers carry: training may have ended since.
                self._keep(dict(zip(missing, answers, strict=True)), version)
        return [found[key] for key in keys], version

    def _find(self, keys: Sequence[K], version: str) -> dict[K, V]:
        with self._lock:
            known = [key for key in keys if (key, version) in self._kept]
            for key in known:
                self._kept.move_to_end((key, version))
            return {key: self._kept[key, version] for key in known}

    def _keep(self, answers: dict[K, V], version: str) -> None:
        with self._lock:
            for key, value in answers.items():
                self._kept[key, version] = value
            while len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
