"""The aiohttp application: routes and middlewares, nothing else."""

from aiohttp import web

from inference.server import admin_routes, chat_route, generate_route, info_routes, score_route
from inference.server.errors_json import errors_as_json
from inference.server.state import STATE, ServerState
from transport.wire.generation import GENERATE_PATH, SCORE_PATH, WEIGHTS_PATH


def make_app(state: ServerState) -> web.Application:
    """All routes of docs/contracts.md over `state`."""
    app = web.Application(
        middlewares=[errors_as_json, admin_routes.require_admin_token], client_max_size=state.max_body_bytes
    )
    app[STATE] = state
    app.add_routes(
        [
            web.get("/health", info_routes.health),
            web.get("/v1/models", info_routes.models),
            web.post("/v1/chat/completions", chat_route.chat_completions),
            web.post(GENERATE_PATH, generate_route.generate),
            web.post(SCORE_PATH, score_route.score),
            web.get(WEIGHTS_PATH, admin_routes.get_weights),
            web.post(WEIGHTS_PATH, admin_routes.apply_weights),
        ]
    )
    return app
