"""A model's folder on the form, in a real browser: chosen, dropped, or made of links."""

import json
from pathlib import Path
from typing import Any

import pytest
from browser_page import address_of, open_page
from checkpoint_examples import write_safetensors
from web_client import TINY_CONFIG, WebClient

from foretoken.domain.text_file import parse_json_texts

pytestmark = pytest.mark.slow


def test_files_of_a_models_folder_are_asked_about_together(web: WebClient, browser: Any) -> None:
    stored = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    files = [
        {"name": name, "mimeType": "application/json", "buffer": json.dumps(content).encode()}
        for name, content in (("hf_quant_config.json", stored), ("config.json", TINY_CONFIG))
    ]
    with open_page(browser) as page:
        page.goto(address_of(web, "/"))
        page.get_by_text("Another model: paste its config.json").click()
        with page.expect_response("**/check") as checked:
            page.get_by_label("Or choose it in the model's folder").set_input_files(files)
        assert {} == checked.value.json()
        text = page.get_by_label("Text of the Hugging Face").input_value()
        assert [TINY_CONFIG, stored] == parse_json_texts(text, "config")


def test_a_models_folder_is_dropped_whole(web: WebClient, browser: Any, tmp_path: Path) -> None:
    """More files than a reader gives at once, and folders in it, are no hindrance.

    What its files hold is compared with what its configuration says.
    """
    stored = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    model, empty = tmp_path / "model", tmp_path / "empty"
    for folder in (model / "original", empty):
        folder.mkdir(parents=True)
    for number in range(120):
        (model / f"model-{number:05}-of-00120.safetensors").write_bytes(b"")
    (model / "config.json").write_text(json.dumps(TINY_CONFIG))
    (model / "hf_quant_config.json").write_text(json.dumps(stored))
    index = {"metadata": {"total_size": 10 * 2**30}, "weight_map": {}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_page(browser) as page:
        page.goto(address_of(web, "/"))
        with page.expect_response("**/check") as checked:
            _drop(page, "Another model: paste its config.json", model)
        assert ["checkpoint-bytes"] == list(checked.value.json())
        page.get_by_text("Its files hold 10.0 GiB").wait_for()
        text = page.get_by_label("Text of the Hugging Face").input_value()
        assert [TINY_CONFIG, stored] == parse_json_texts(text, "config")
        _drop(page, "Another model: paste its config.json", empty)
        page.get_by_text("there is no config.json in this folder").wait_for()


def test_the_header_of_a_single_file_says_what_it_holds(
    web: WebClient, browser: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    write_safetensors(tmp_path / "model.safetensors", {"a": (0, 2**20), "b": (2**20, 3 * 2**20)})
    with open_page(browser) as page:
        page.goto(address_of(web, "/"))
        with page.expect_request("**/check") as checked:
            _drop(page, "Another model: paste its config.json", tmp_path)
        assert str(3 * 2**20) in checked.value.post_data


def test_a_folder_of_links_says_to_choose_the_file(
    web: WebClient, browser: Any, tmp_path: Path
) -> None:
    """The cache of the Hugging Face hub has links alone, which Chromium hides in a folder."""
    blob, snapshot = tmp_path / "blob", tmp_path / "snapshot"
    blob.write_text(json.dumps(TINY_CONFIG))
    snapshot.mkdir()
    (snapshot / "config.json").symlink_to(blob)
    with open_page(browser) as page:
        page.goto(address_of(web, "/"))
        _drop(page, "Another model: paste its config.json", snapshot)
        page.get_by_text("choose the file below").wait_for()
        page.get_by_label("Or choose it in the model's folder").set_input_files(
            snapshot / "config.json"
        )
        page.get_by_text("choose the file below").wait_for(state="detached")
        text = page.get_by_label("Text of the Hugging Face")
        assert json.loads(text.input_value()) == TINY_CONFIG


def _drop(page: Any, text: str, path: Path) -> None:
    """Drop what lies at a path on a text of the page, as from a window of files."""
    box = page.get_by_text(text).bounding_box()
    at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    session = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "data": data, **at})
