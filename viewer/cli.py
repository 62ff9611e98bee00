"""`rl view RUN [RUN2]` and `rl report RUN`, found by `rl` through the entry points `tandem.commands`."""

import argparse
import asyncio
import math
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from rich.console import Console

from runtime.base.files import read_or_make_secret
from transport.errors import SecurityError
from transport.security.exposure import check_exposure, netloc, reachable
from viewer.errors import ViewerError, reading
from viewer.index.run import Run
from viewer.index.run_index import cache_folder

PORT = 8765
MAX_RUNS = 2


def view(argv: Sequence[str]) -> int:
    """Serve the page, or print to the terminal, until Ctrl-C; the exit code."""
    arguments = _view_parser().parse_args(argv)
    token = _token(arguments.host, arguments.token_file)
    with ExitStack() as stack:
        runs = [stack.enter_context(closing(open_run(path))) for path in _run_paths(arguments.runs)]
        if arguments.terminal:
            from viewer.views.terminal import show

            return show(runs[0], Console(highlight=False), arguments)
        asyncio.run(_serve(runs, arguments.host, arguments.port, token))
    return 0


def report(argv: Sequence[str]) -> int:
    """Write one HTML file that opens offline; the exit code."""
    from viewer.views.report import make_report

    arguments = _report_parser().parse_args(argv)
    with ExitStack() as stack:
        runs = [stack.enter_context(closing(open_run(path))) for path in _run_paths(arguments.runs)]
        out: Path = arguments.out or runs[0].dir.report / "report.html"
        document = make_report(runs, max_bytes=int(arguments.max_mb * 1e6))
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(document, encoding="utf-8")
        except OSError as error:
            raise ViewerError(f"cannot write {out}: {error.strerror}; choose another with --out") from error
    print(f"{out}  ({len(document.encode()) / 1e6:.1f} MB, opens in any browser, without a network)")
    return 0


def open_run(path: Path) -> Run:
    """The run in `path`, or of that name below `runs/`, indexed."""
    with reading():
        below = Path("runs") / path
        run = Run(below if not path.exists() and below.is_dir() else path, cache_folder())
        run.refresh()
        return run


def _view_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("rl view", description="Look inside a run: a page on this machine, or a terminal.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory; a second one is compared")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; beyond loopback needs --token-file")
    parser.add_argument("--port", type=_port, metavar="PORT", default=PORT, help=f"port; 0 is a free one [{PORT}]")
    parser.add_argument("--token-file", type=Path, help="file with the token that visitors need; made if missing")
    parser.add_argument("--terminal", action="store_true", help="print instead of serving a page (SSH)")
    parser.add_argument("--step", type=int, help="with --terminal: the groups of this step")
    parser.add_argument("--group", help="with --terminal: this group, its rollouts side by side")
    parser.add_argument("--rollout", help="with --terminal: this rollout (as STEP.LINE) with its tokens")
    return parser


def _report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("rl report", description="Write a run as one HTML file that opens offline.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory; a second one is compared")
    parser.add_argument("--out", type=Path, help="file to write [RUN/report/report.html]")
    parser.add_argument("--max-mb", type=_megabytes, default=8.0, help="most megabytes of data, all runs together [8]")
    return parser


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:6]) <= 65535):
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, got {text!r}")
    return int(text)


def _megabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _run_paths(paths: Sequence[Path]) -> Sequence[Path]:
    if len(paths) > MAX_RUNS:
        raise ViewerError(f"at most {MAX_RUNS} runs can be shown side by side, got {len(paths)}")
    return paths


def _token(host: str, file: Path | None) -> str | None:
    """The token that visitors need; `None` on a loopback address without one. Raises `UserError`."""
    if file is not None:
        return read_or_make_secret(file, "--token-file")
    advice = ": name a --token-file (it is made if missing)"
    try:
        check_exposure(f"http://{netloc(host, 0)}", name=host, is_protected=False, advice=advice)
    except SecurityError as error:
        raise ViewerError(str(error)) from error
    return None


async def _serve(runs: Sequence[Run], host: str, port: int, token: str | None) -> None:
    from viewer.views.server import make_app, serve

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def ready(bound: int) -> None:
        url = reachable(f"http://{netloc(host, bound)}")
        print(f"{url}/" + (f"?token={token}" if token else ""), "  (Ctrl-C ends it)")
        sys.stdout.flush()

    try:
        await serve(make_app(runs, token), host, port, ready, stop)
    except OSError as error:
        raise ViewerError(f"cannot serve on {netloc(host, port)}: {error.strerror}; choose another --port") from error
