"""Write charts as picture files, drawn by Vega as on a page.

Vega runs inside of `vl-convert-python`: https://github.com/vega/vl-convert, BSD-3-Clause.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretoken.domain.errors import InvalidRequestError
from foretoken.page.block import Chart, to_json
from foretoken.page.chart import ROW, Spec

# The format of a picture is that of its file's ending.
PICTURES = (".png", ".svg", ".pdf")
# So many stand in a row; one alone is wider.
_COLUMNS = 3
_WIDTH_PX, _PANEL_PX = 720, 240
_PNG_SCALE = 2.0
_CONFIG: Spec = {
    "background": "white",
    "font": "sans-serif",
    "padding": 12,
    "view": {"stroke": None},
    "title": {"anchor": "start", "fontSize": 13},
}


def write_picture(path: Path, charts: Sequence[Chart]) -> None:
    """Write charts into one picture, in the format of the path's ending; see `PICTURES`.

    Raises:
        InvalidRequestError: see `load_vega`.

    """
    vega = load_vega()
    width_px = _WIDTH_PX if len(charts) == 1 else _PANEL_PX
    views = [_alone(chart, width_px) for chart in charts]
    spec = views[0] if len(views) == 1 else {"concat": views, "columns": _COLUMNS}
    spec = {"config": _CONFIG, **spec}
    match path.suffix:
        case ".png":
            path.write_bytes(vega.vegalite_to_png(spec, scale=_PNG_SCALE))
        case ".pdf":
            path.write_bytes(vega.vegalite_to_pdf(spec))
        case _:
            path.write_text(vega.vegalite_to_svg(spec), encoding="utf-8")


def load_vega() -> Any:
    """Return what draws; called before any work is done for a picture.

    Raises:
        InvalidRequestError: the package is not here.

    """
    try:
        import vl_convert  # 33 MB that only pictures need
    except ModuleNotFoundError as err:
        raise InvalidRequestError.of_field(
            "picture", f"needs {err.name}: pip install 'foretoken[pictures]'; pages need no more"
        ) from err
    return vl_convert


def _alone(chart: Chart, width_px: int) -> Spec:
    """Return a chart with its rows, which no one can zoom or pick from."""
    table = to_json(chart)["table"]
    names = [column["name"] for column in table["columns"]]
    rows = [
        {ROW: place, **dict(zip(names, row, strict=True))}
        for place, row in enumerate(table["rows"])
    ]
    still = _without_selections(json.loads(json.dumps(chart.spec)))
    return {**still, "title": chart.title, "width": width_px, "data": {"values": rows}}


def _without_selections(spec: Any) -> Any:
    if isinstance(spec, list):
        return [_without_selections(part) for part in spec]
    if not isinstance(spec, dict):
        return spec
    if "param" in spec.get("condition", ()):
        return {"value": spec["condition"]["value"]}
    return {name: _without_selections(part) for name, part in spec.items() if name != "params"}
