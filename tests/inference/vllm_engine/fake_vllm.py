"""Stands in for vLLM's server where the supervisor is tested: answers `/health`, and behaves as `mode` says.

python -m tests.inference.vllm_engine.fake_vllm MODE PORT
"""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

MODES = ("well", "foreign", "dead", "breaks off", "refuses", "crashes")


class Handler(BaseHTTPRequestHandler):
    """`/health`, as the mode of the server has it; `/dies` makes the engine die."""

    mode = "well"

    def do_GET(self) -> None:
        if self.path == "/dies":
            type(self).mode = "dead"
        status = "dead" if self.mode == "dead" else "ok"
        body = b"" if self.mode == "foreign" else json.dumps({"status": status, "version": 3, "running": 2}).encode()
        self.send_response(503 if status == "dead" else 200)
        if self.mode == "breaks off":
            self.send_header("Content-Length", str(len(body) + 1))
            print("broke off", flush=True)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def main(mode: str, port: int) -> None:
    if mode == "refuses":
        print("server: error: unrecognized arguments: --nonsense", file=sys.stderr)
        sys.exit(2)
    if mode == "crashes":
        raise ValueError("head size 16 is not supported")
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as vLLM's engine process
    print(f"engine {engine.pid}", flush=True)
    Handler.mode = mode
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
