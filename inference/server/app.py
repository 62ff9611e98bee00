"""The aiohttp application: routes and middlewares, nothing else."""

from aiohttp import web

from inference.server import chat_route, routes
from inference.server.routes import STATE, ServerState, errors_as_json
from transport.wire.generation import GENERATE_PATH, SCORE_PATH, WEIGHTS_PATH


def make_app(state: ServerState) -> web.Application:
    """All routes of docs/contracts.md over `state`."""
    app = web.Application(
        middlewares=[errors_as_json, routes.require_admin_token], client_max_size=state.max_body_bytes
    )
    app[STATE] = state
    app.add_routes(
        [
            web.get("/health", routes.health),
            web.get("/v1/models", routes.models),
            web.post("/v1/chat/completions", chat_route.chat_completions),
            web.post(GENERATE_PATH, routes.generate),
            web.post(SCORE_PATH, routes.score),
            web.get(WEIGHTS_PATH, routes.get_weights),
            web.post(WEIGHTS_PATH, routes.apply_weights),
        ]
    )
    return app
