"""Server-sent events out of bytes that arrive in pieces of any size.

Source: WHATWG HTML, "Server-sent events": lines end in LF, CR LF or CR; `data:` lines of an event
are joined; an empty line ends it; lines that begin with a colon are comments.
"""

from collections.abc import Iterator


class EventStream:
    """Takes bytes as they come and gives the data of each event that is complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[str]:
        """Yield the data of the events that this piece completes."""
        lines = (self._rest + piece).splitlines(keepends=True)
        self._rest = b""
        for index, line in enumerate(lines):
            is_last = index == len(lines) - 1
            # A carriage return at the end may be half of a line's ending.
            if is_last and not line.endswith(b"\n"):
                self._rest = line
                return
            yield from self._take(line.rstrip(b"\r\n").decode("utf-8", errors="replace"))

    def close(self) -> Iterator[str]:
        """Yield the event that the end of the stream completes, if any."""
        rest, self._rest = self._rest, b""
        yield from self._take(rest.rstrip(b"\r\n").decode("utf-8", errors="replace"))
        yield from self._take("")

    def _take(self, line: str) -> Iterator[str]:
        if line.startswith("data:"):
            self._data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and self._data:
            data, self._data = "\n".join(self._data), []
            yield data
