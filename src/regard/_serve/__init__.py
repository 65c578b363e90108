"""The local page: recordings of a folder, and looks at models that are on this machine.

It listens on this machine only, and answers nobody else: see ``_guard``. Paths stay inside the folder: see ``_folder``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from regard._page import script
from regard._page._document import served
from regard._page._pack import SERVED, pack
from regard._serve._folder import Folder, Refusal
from regard._serve._guard import Guard
from regard._serve._looks import Looks

if TYPE_CHECKING:
    from starlette.requests import Request


def application(folder: Path, looks: Looks, hosts: frozenset[str], lang: str = "en") -> Starlette:
    """The server's answers. ``hosts`` are the names, with port, under which it may be asked."""
    inside = Folder(folder)

    async def home(request: Request) -> Response:
        return HTMLResponse(served("regard", lang))

    async def module(request: Request) -> Response:
        return Response(script(), media_type="text/javascript; charset=utf-8")

    async def state(request: Request) -> Response:
        listed = await run_in_threadpool(inside.recordings)
        models = await run_in_threadpool(looks.models)
        return JSONResponse({"folder": str(inside.root), "recordings": listed, "models": models, "look": looks.state()})

    async def data(request: Request) -> Response:
        names = [request.query_params.get(key) for key in ("name", "against")]
        packed = await run_in_threadpool(_packed, inside, looks, [name for name in names if name], lang)
        return Response(packed, media_type="application/octet-stream")

    async def begin(request: Request) -> Response:
        given = await _body(request)
        model, text = given.get("model"), given.get("text")
        if not isinstance(model, str) or not isinstance(text, str) or not text.strip():
            raise Refusal(400, "model and text must be given, and the text must not be empty")
        looks.begin(model, text)
        return JSONResponse(looks.state(), status_code=202)

    async def progress(request: Request) -> Response:
        return JSONResponse(looks.state())

    async def cancel(request: Request) -> Response:
        looks.cancel()
        return JSONResponse(looks.state())

    async def weights(request: Request) -> Response:
        found = await run_in_threadpool(looks.weights, await _body(request))
        return Response(found, media_type="application/octet-stream")

    routes = [
        Route("/", home),
        Route("/page.js", module),
        Route("/api/state", state),
        Route("/api/recording", data),
        Route("/api/look", progress, methods=["GET"]),
        Route("/api/look", begin, methods=["POST"]),
        Route("/api/look", cancel, methods=["DELETE"]),
        Route("/api/weights", weights, methods=["POST"]),
    ]
    made = Starlette(routes=routes, exception_handlers={Refusal: _refuse})
    made.add_middleware(Guard, hosts=hosts)
    return made


def _packed(folder: Folder, looks: Looks, names: list[str], lang: str) -> bytes:
    from regard.recording import load

    if not names:
        raise Refusal(400, "name says which recording")
    recordings = []
    for name in names:
        kept = looks.recording(name)
        try:
            recordings.append(load(folder.path(name)) if kept is None else kept)
        except ValueError as error:
            raise Refusal(422, str(error).replace(f"{folder.root}{os.sep}", "")) from None
    extra: dict[str, Any] = {"open": {"lang": lang, **({"view": "compare"} if len(names) > 1 else {})}}
    if len(names) == 1 and looks.can_detail(names[0], recordings[0]):
        extra["detail"] = True
    return pack(recordings, SERVED, extra)


async def _body(request: Request) -> dict[str, Any]:
    try:
        given = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise Refusal(400, "the body must be a JSON object") from None
    if not isinstance(given, dict):
        raise Refusal(400, "the body must be a JSON object")
    return given


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return JSONResponse({"error": error.why}, status_code=error.status)
