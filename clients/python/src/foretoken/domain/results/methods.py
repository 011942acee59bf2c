"""What every result can do: show itself, and leave the program as data, a table or a page."""

from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from foretoken.domain import schema
from foretoken.domain.errors import InvalidRequestError

# What draws results stands above the domain and loads more than most programs need. So it is found
# by name when it is first asked for, as plug-ins are.
_PRESENTER = "foretoken.app.presentation"


def to_plain(value: Any) -> Any:
    """Return results as `schema.encode` does, with null for figures of nothing.

    A dataclass names fields that are such summaries by its method `unobserved`.
    """
    encoded = schema.encode(value)
    _leave_out(value, encoded)
    return encoded


def _leave_out(value: Any, encoded: Any) -> None:
    if isinstance(encoded, list):
        if encoded and is_dataclass(value[0]):
            for item, plain in zip(value, encoded, strict=True):
                _leave_out(item, plain)
    elif is_dataclass(value) and isinstance(encoded, dict):
        for name in getattr(value, "unobserved", tuple)():
            encoded[name] = dict.fromkeys(encoded[name])
        for name, plain in encoded.items():
            _leave_out(getattr(value, name), plain)


class ResultMethods:
    """Methods of all results.

    A result has tables: `summary`, one row with a column for each figure, named by its path
    (`ttft_ms.p99`), and one for each list or set of columns in it (`requests`, `candidates`).
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """Return a line: the kind of result, what it is of, and what sums it up."""
        return f"<{type(self).__name__}: {_presenter().describe(self)}>"

    def _repr_html_(self) -> str:
        """Return a table of the figures, as notebooks show it."""
        return str(_presenter().render_figures(self))

    def to_dict(self) -> dict[str, Any]:
        """Return everything in plain data, as `--output json` prints it; enums by name.

        Figures of nothing are None, as the latencies are where no request was served.
        """
        return dict(to_plain(self))

    def to_arrow(self, table: str = "") -> Any:
        """Return a table as a `pyarrow.Table`; unless one is named, the first of its columns.

        Raises:
            InvalidRequestError: there is no table of that name; the message has those there are.

        """
        return _presenter().build_table(self, table)

    def to_pandas(self, table: str = "") -> Any:
        """Return a table as a `pandas.DataFrame`; see `to_arrow`.

        Raises:
            InvalidRequestError: pandas is not installed, or as `to_arrow`.

        """
        try:
            import_module("pandas")
        except ModuleNotFoundError as err:
            raise InvalidRequestError(
                "a data frame needs pandas: pip install 'foretoken[pandas]'; to_arrow() and"
                " to_dict() need nothing more"
            ) from err
        return self.to_arrow(table).to_pandas()

    def save(self, path: str | Path) -> Path:
        """Write the page with pictures that the command line writes of it, and return its path.

        Raises:
            InvalidRequestError: the file is not to be a page (`.html`).

        """
        target = Path(path)
        if target.suffix.lower() not in (".html", ".htm"):
            raise InvalidRequestError.of_field("path", f"{target} is no page: end it in .html")
        target.write_text(_presenter().render_page(self), encoding="utf-8")
        return target


def _presenter() -> Any:
    return import_module(_PRESENTER)
