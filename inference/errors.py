"""What can go wrong while serving, and the HTTP status each one becomes.

InferenceError
├── BadRequest        400  the request can never be served: say what to change
├── WrongAdminToken   401  the admin token is missing or wrong
├── AdminDisabled     403  the server was started without an admin token
├── UnknownModel      404  the request names a model that is not served here
├── WeightsRefused    409  a publish that must not be loaded; the old weights stay in service
├── BodyTooLarge      413  the request is larger than any that could be served
├── QueueFull         429  too many requests are waiting: try again later
├── Unsupported       501  this engine cannot do that
├── NonFiniteLogits   500  the weights in service give NaN or infinity for this prompt
├── WeightsNotHeld    500  a layer computes with other weights than it was given; the engine must end
├── Unavailable       503  loading, stopping, or the engine died
└── DeadlineExceeded  504  the request took longer than the server allows
"""


class InferenceError(Exception):
    """Base of everything this package raises on purpose. `status` and `kind` are the HTTP face."""

    status = 500
    kind = "internal_error"


class BadRequest(InferenceError):
    """A request that can never be served."""

    status = 400
    kind = "invalid_request_error"


class WrongAdminToken(InferenceError):
    """The caller may not use the admin routes."""

    status = 401
    kind = "wrong_admin_token"


class AdminDisabled(InferenceError):
    """The server has no admin token, so its admin routes are closed to everyone."""

    status = 403
    kind = "admin_disabled"


class UnknownModel(InferenceError):
    """The caller asked for a model that is not here."""

    status = 404
    kind = "model_not_found"


class WeightsRefused(InferenceError):
    """The publish is torn, corrupt or of another model; nothing was changed."""

    status = 409
    kind = "weights_refused"


class BodyTooLarge(InferenceError):
    """The body is larger than any request that could be served."""

    status = 413
    kind = "http_error"


class QueueFull(InferenceError):
    """The queue of waiting requests is full."""

    status = 429
    kind = "queue_full"


class Unsupported(InferenceError):
    """The route exists, but the engine behind this server has no such ability."""

    status = 501
    kind = "unsupported"


class NonFiniteLogits(InferenceError):
    """A sampled token has no finite log probability: the weights are broken, the request is not."""

    status = 500
    kind = "non_finite_logits"


class WeightsNotHeld(InferenceError):
    """What was read back from a model is not what was loaded into it."""

    status = 500
    kind = "weights_not_held"


class Unavailable(InferenceError):
    """The engine cannot take requests now."""

    status = 503
    kind = "unavailable"


class DeadlineExceeded(InferenceError):
    """The server gave the request up and freed its slot."""

    status = 504
    kind = "deadline_exceeded"
