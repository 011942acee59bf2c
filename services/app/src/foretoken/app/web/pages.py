"""The routes of pages: views run in threads, their templates make HTML of what they return."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs

import jinja2
from aiohttp import web

from foretoken import __version__
from foretoken.app.web.callers import COOKIE, Callers, peer_of
from foretoken.app.web.calls import Caller, Calls
from foretoken.app.web.imports import Imports
from foretoken.app.web.problem import HttpRefusal, describe_problem
from foretoken.app.web.views import (
    answer,
    ask,
    compare,
    datasets,
    imports,
    jobs,
    measurements,
    results,
    strategies,
    validate,
    validated,
)
from foretoken.app.web.visit import Redirect, Sent, Shown, Upload, Visit
from foretoken.app.web.warm_ups import WarmUps
from foretoken.domain.errors import UnauthenticatedError
from foretoken.domain.metrics.number_text import format_number

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
View = Callable[[Visit], Shown | Redirect | Sent]

VIEWS: Mapping[str, View] = {
    "GET /": ask.SERVING_QUESTION.show,
    "POST /": ask.SERVING_QUESTION.ask,
    "POST /check": ask.SERVING_QUESTION.check,
    "GET /train": ask.TRAINING_QUESTION.show,
    "POST /train": ask.TRAINING_QUESTION.ask,
    "POST /train/check": ask.TRAINING_QUESTION.check,
    "GET /answers/{job}": answer.show,
    "GET /answers/{job}/candidates": answer.send_candidates,
    "GET /answers/{job}/deployment": answer.send_deployment,
    "POST /answers/{job}/simulate": answer.simulate,
    "GET /jobs": jobs.show,
    "GET /jobs/list": jobs.send_list,
    "GET /jobs/{service}/{job}": jobs.show_one,
    "POST /jobs/{service}/{job}/cancel": jobs.cancel,
    "POST /jobs/{service}/{job}/resume": jobs.resume,
    "GET /results": results.show,
    "GET /results/{job}": results.show_one,
    "GET /results/{job}/report": results.send_report,
    "GET /results/{job}/file": results.send_file,
    "GET /results/{job}/trace": results.send_trace,
    "GET /strategies/{job}": strategies.show,
    "GET /strategies/{job}/candidates": strategies.send_candidates,
    "GET /strategies/{job}/launch": strategies.send_launch,
    "POST /strategies/{job}/simulate": strategies.simulate,
    "GET /compare": compare.show,
    "GET /compare/report": compare.send_report,
    "GET /catalog": datasets.show,
    "GET /catalog/sql": datasets.show_sql,
    "GET /catalog/sql/chart": datasets.send_chart,
    "GET /catalog/curves": measurements.show_curves,
    "GET /catalog/curves/report": measurements.send_curves,
    "GET /catalog/estimate": measurements.show_estimate,
    "POST /catalog/check": measurements.check,
    "GET /catalog/quality/{job}": measurements.show_quality,
    "GET /catalog/quality/{job}/report": measurements.send_quality,
    "GET /catalog/imports": imports.show,
    "POST /catalog/imports": imports.start,
    "POST /catalog/install": imports.install,
    "GET /catalog/imports/{job}": imports.show_one,
    "GET /catalog/imports/{job}/state": imports.send_state,
    "POST /catalog/imports/{job}/cancel": imports.cancel,
    "POST /catalog/imports/{job}/resume": imports.resume,
    "GET /validate": validate.FORMS["serving"].show,
    "POST /validate": validate.FORMS["serving"].post,
    "GET /validate/training": validate.FORMS["training"].show,
    "POST /validate/training": validate.FORMS["training"].post,
    "GET /validate/{name}": validated.show,
    "GET /validate/{name}/report": validated.send_report,
    "GET /validate/{name}/measured": validated.send_measured,
    "POST /validate/{name}/calibrate": validated.calibrate,
    "POST /validate/{name}/forget": validated.forget,
}
_NAV: Final = (
    ("/", "Ask"),
    ("/train", "Train"),
    ("/jobs", "Jobs"),
    ("/results", "Results"),
    ("/compare", "Compare"),
    ("/catalog", "Catalog"),
    ("/validate", "Validate"),
)
_MEDIA: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FORMS: Final = ("application/x-www-form-urlencoded", "multipart/form-data")
_SIGN_IN_BYTES: Final = 16_384
_YEAR_S: Final = 31_536_000


class StaticFiles:
    """Files of the program by name; an address has what a file holds, and so never gets old."""

    def __init__(self) -> None:
        """Read them."""
        folder = files(__package__) / "static"
        self._files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self._marks = {
            name: hashlib.sha256(content).hexdigest()[:12] for name, content in self._files.items()
        }
        self._mark = hashlib.sha256("".join(sorted(self._marks.values())).encode()).hexdigest()[:12]

    def address(self, name: str) -> str:
        """Return where a page finds a file; modules import each other by name in one folder."""
        return f"/static/{self._mark}/{name}"

    async def send(self, request: web.Request) -> web.StreamResponse:
        """Answer with a file."""
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound
        media = _MEDIA.get(name.rpartition(".")[2], "application/octet-stream")
        sent = web.Response(body=self._files[name], content_type=media, charset="utf-8")
        if request.match_info["mark"] == self._mark:
            sent.headers["Cache-Control"] = f"public, max-age={_YEAR_S}, immutable"
        sent.enable_compression()
        return sent


class Pages:
    """Answers for all pages."""

    def __init__(self, calls: Calls, callers: Callers) -> None:
        """Keep whom pages ask."""
        self._calls = calls
        self._callers = callers
        self._static = StaticFiles()
        self._imports = Imports()
        self._warm_ups = WarmUps()
        self._templates = jinja2.Environment(
            loader=jinja2.PackageLoader(__package__ or "", "templates"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=jinja2.StrictUndefined,
        )
        self._templates.filters["number"] = lambda value: format_number(value, 4)
        self._templates.filters["moment"] = lambda at: at[:19].replace("T", " ")
        self._templates.filters["zip_same"] = lambda names: [(name, name) for name in names]
        self._templates.globals.update(
            static=self._static.address,
            nav=_NAV,
            version=__version__,
            has_tokens=callers.has_tokens,
        )

    def add(self, routes: web.UrlDispatcher) -> None:
        """Add the routes."""
        for route, view in VIEWS.items():
            method, _, path = route.partition(" ")
            routes.add_route(method, path, self._handle(route, view))
        routes.add_get("/static/{mark}/{name}", self._static.send)
        routes.add_get("/sign-in", self._show_sign_in)
        routes.add_post("/sign-in", self._sign_in)

    def close(self) -> None:
        """Wait for what pages began in this process."""
        self._warm_ups.close()

    def _handle(self, route: str, view: View) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                visit = await self._visit(request)
                shown = await self._calls.run(route, lambda: view(visit))
            except UnauthenticatedError as err:
                return self._render("sign_in.html", {"problem": err.message}, request, 401)
            except asyncio.CancelledError:
                raise
            except Exception as err:  # noqa: BLE001
                # The boundary of the process: every error must become a page.
                problem = describe_problem(err)
                return self._render(
                    "problem.html", {"problem": problem}, request, problem["status"]
                )
            if isinstance(shown, Redirect):
                return web.Response(status=303, headers={"Location": shown.target})
            if isinstance(shown, Sent):
                return _send(shown)
            return self._render(
                shown.template, {**shown.content, "visit": visit}, request, shown.status
            )

        return handle

    async def _visit(self, request: web.Request) -> Visit:
        caller = Caller(await self._callers.find(request), peer_of(request))
        form: dict[str, list[str]] = {}
        uploads: dict[str, Upload] = {}
        if request.method == "POST":
            if request.content_type not in _FORMS:
                raise HttpRefusal(415, "CONTENT_TYPE", f"pages take {' or '.join(_FORMS)}")
            try:
                posted = await request.post()
            except ValueError as err:
                raise HttpRefusal(400, "FORM", f"the form cannot be read: {err}") from err
            for name, value in posted.items():
                if isinstance(value, web.FileField):
                    uploads[name] = Upload(value.filename, value.file.read())
                elif isinstance(value, str):
                    form.setdefault(name, []).append(value)
        return Visit(
            path=request.path,
            query={key: request.query.getall(key) for key in request.query},
            place=dict(request.match_info),
            form=form,
            uploads=uploads,
            caller=caller,
            access=self._callers.access,
            offered=self._calls.offered,
            imports=self._imports,
            warm_ups=self._warm_ups,
        )

    def _render(
        self, template: str, content: Mapping[str, Any], request: web.Request, status: int = 200
    ) -> web.Response:
        text = self._templates.get_template(template).render(path=request.path, **content)
        shown = web.Response(text=text, content_type="text/html", status=status)
        shown.enable_compression()
        return shown

    @web.middleware
    async def show_refusal(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Show a browser that there is no such page as a page; aiohttp calls this."""
        try:
            return await handler(request)
        except web.HTTPNotFound as err:
            if "text/html" not in request.headers.get("Accept", ""):
                raise
            detail = f"there is no page {request.path}"
            problem = {"status": err.status, "reason": "NOT_FOUND", "detail": detail}
            return self._render("problem.html", {"problem": problem}, request, err.status)

    async def _show_sign_in(self, request: web.Request) -> web.StreamResponse:
        return self._render("sign_in.html", {"problem": ""}, request)

    async def _sign_in(self, request: web.Request) -> web.StreamResponse:
        # Anybody may send this.
        whole = request.clone(client_max_size=_SIGN_IN_BYTES)
        form = parse_qs((await whole.read()).decode(errors="replace"))
        token = (form.get("token") or [""])[0].strip()
        if not await self._callers.is_token(token):
            return self._render("sign_in.html", {"problem": "no such token"}, request, 401)
        signed = web.Response(status=303, headers={"Location": "/"})
        signed.set_cookie(
            COOKIE, token, httponly=True, samesite="Strict", secure=_is_secure(request), path="/"
        )
        return signed


def _is_secure(request: web.Request) -> bool:
    # TLS may end at a proxy: the browser says how it came.
    return request.secure or request.headers.get("Origin", "").startswith("https://")


def _send(sent: Sent) -> web.Response:
    shown = web.Response(body=sent.body, content_type=sent.media, charset="utf-8")
    if sent.file_name:
        shown.headers["Content-Disposition"] = f'attachment; filename="{sent.file_name}"'
    if sent.policy:
        shown.headers["Content-Security-Policy"] = sent.policy
    shown.enable_compression()
    return shown
