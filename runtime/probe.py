"""`python -m runtime.probe URL`: exit 0 if the URL answers 2xx, 1 otherwise. For health checks of containers."""

import sys
import urllib.error
import urllib.request

TIMEOUT_S = 3.0


def probe(url: str) -> bool:
    """Whether `url` answers with success."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return 200 <= int(response.status) < 300
    except (OSError, ValueError):  # no answer, an answer that is an error, or no URL
        return False


if __name__ == "__main__":
    sys.exit(0 if len(sys.argv) == 2 and probe(sys.argv[1]) else 1)
