"""The body of one HTTP answer."""

import http.client
import urllib.error
import urllib.request


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
