"""Who may look: a request must name this machine, or bear the token.

Without a token only a loopback address is bound, and only requests to a loopback name are answered: a web site that a
browser has open can point its own name at 127.0.0.1 (DNS rebinding), but not change the name it asks for. With a
token, the first visit brings it in the address; a cookie keeps it, and the address is cleaned.
"""

import hmac
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from transport.security.exposure import is_local, netloc

COOKIE = "tandem_view"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def guard(token: str | None) -> Middleware:
    """The middleware that every request passes."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if token is None and not _names_this_machine(request.host):
                raise web.HTTPForbidden(text=f"{request.host} is not a name of this machine\n")
            if token is not None and not _bears(request, token):
                raise web.HTTPUnauthorized(text="open the address that `rl view` printed: it has the token\n")
            if token is not None and "token" in request.query:
                raise _remembered(token)
            response = await handler(request)
        except web.HTTPException as refusal:
            refusal.headers.update(HEADERS)
            raise
        response.headers.update(HEADERS)
        return response

    return check


def _names_this_machine(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    return is_local(f"http://{netloc(name, 0)}")


def _bears(request: web.Request, token: str) -> bool:
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    given = (request.query.get("token"), request.cookies.get(COOKIE), bearer if scheme == "Bearer" else None)
    return any(hmac.compare_digest(one.encode(), token.encode()) for one in given if one)


def _remembered(token: str) -> web.HTTPFound:
    found = web.HTTPFound("/")
    found.set_cookie(COOKIE, token, httponly=True, samesite="Strict", path="/")
    return found
