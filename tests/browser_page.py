"""A page of a real browser, and where the pages of a served home are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from web_client import WebClient


@contextmanager
def open_page(browser: Any, width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    """Yield a page; an error of a script, or something that its policy stopped, fails the test."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
    )
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("dialog", lambda dialog: wrong.append(dialog.message) or dialog.dismiss())
    yield page
    context.close()
    assert [] == wrong


def address_of(web: WebClient, path: str) -> str:
    return f"http://127.0.0.1:{web.port}{path}"
