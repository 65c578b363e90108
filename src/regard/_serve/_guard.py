"""Who may ask, and how much may be said (rule 62)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BODY = 1 << 20
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
)


class Guard:
    """Refuses a foreign Host (a name that points here from elsewhere), a foreign Origin on whatever changes something,
    and bodies that are too long, before anything else sees them."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets here
        why = self._refusal(scope)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        if why is not None:
            await JSONResponse({"error": why[1]}, status_code=why[0])(scope, receive, with_headers)
            return
        left = MOST_BODY

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            if message["type"] == "http.request":
                left -= len(message.get("body", b""))
                if left < 0:
                    # what came without a length is cut off, and no longer the JSON that it was
                    return {"type": "http.request", "body": b"", "more_body": False}
            return message

        await self.app(scope, counted, with_headers)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        hosts = [value.decode("latin-1").lower() for value in headers.get(b"host", [])]
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return 403, "this page answers only under the address that it printed"
        if scope["method"] not in ("GET", "HEAD"):
            origins = [value.decode("latin-1").lower() for value in headers.get(b"origin", [])]
            site = headers.get(b"sec-fetch-site", [b"same-origin"])[0]
            if any(origin != f"http://{hosts[0]}" for origin in origins) or site not in (b"same-origin", b"none"):
                return 403, "another page may not change anything here"
            length = headers.get(b"content-length", [b"0"])[0]
            if not length.isdigit() or int(length) > MOST_BODY:
                return 413, f"at most {MOST_BODY} bytes are taken"
        return None
