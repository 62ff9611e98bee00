"""What a service answers over HTTP: any body, and the report of `/health`."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping

from runtime.health import Fact

HEALTH_TIMEOUT_S = 2.0
"""Seconds that a service may take to answer `/health`."""

Report = Mapping[str, Fact]
"""The body of `/health`."""


def http_answer(url: str, timeout_s: float) -> bytes:
    """What `url` answers to GET, whatever the status. Raises `OSError` if nothing comes in time, or only a part."""
    try:
        try:
            with urllib.request.urlopen(url, timeout=timeout_s) as response:
                body: bytes = response.read()
        except urllib.error.HTTPError as error:
            with error:
                body = error.read()
    except http.client.HTTPException as error:  # a server that dies while it answers
        raise ConnectionError(f"the answer broke off: {error!r}") from error
    return body


def ask_health(url: str, timeout_s: float = HEALTH_TIMEOUT_S) -> tuple[Report, str]:
    """The report at `url`, also that of a service that answers 503; or an empty one, and why there is none."""
    try:
        body = http_answer(url, timeout_s)
    except (OSError, ValueError) as error:  # no answer, or no URL
        return {}, f"{url}: {_reason(error)}"
    try:
        report = json.loads(body)
    except (ValueError, RecursionError):
        report = None
    return (report, "") if isinstance(report, dict) else ({}, f"{url} answers with something else than a report")


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(inner, TimeoutError):
        return "no answer in time"
    return (inner.strerror if isinstance(inner, OSError) else None) or str(inner) or type(inner).__name__
