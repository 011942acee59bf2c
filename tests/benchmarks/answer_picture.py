"""Draw the picture of the README: the answer's page as Chromium shows it, in few colours.

Run by `make readme-picture`; answers rest on the starter catalog, where it is installed.
"""

import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from foretoken.app.config import AppConfig, process_environment
from foretoken.app.starter import with_starter

sys.path.append(str(Path(__file__).resolve().parents[1]))

from web_client import serve_home

_WIDTH, _HEIGHT = 1100, 1340
# A page of text and lines needs no more; each halving takes a sixth of the bytes.
_COLOURS = 48
_PATIENCE_MS = 600_000


def draw(path: Path) -> None:
    """Ask the example, wait for its simulations, and write the answer's page."""
    config = with_starter(AppConfig(), process_environment())
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with (
        tempfile.TemporaryDirectory() as home,
        serve_home(Path(home), predictor=config.predictor) as web,
        sync_playwright() as driver,
    ):
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT})
        page.goto(
            f"http://127.0.0.1:{web.port}/?model=llama-3.1-8b&devices=h100_sxm&gpus=8&isl=1024"
            "&osl=256&ttft=2s&tpot=30ms&finalists=3&prices=lambda"
        )
        page.get_by_role("button", name="Answer").click()
        whole = page.get_by_role("link", name="Show the whole answer")
        whole.wait_for(timeout=_PATIENCE_MS)
        whole.click()
        page.get_by_text("meet the limits; best").wait_for(timeout=_PATIENCE_MS)
        shot = Image.open(io.BytesIO(page.screenshot()))
        browser.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    shot.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
