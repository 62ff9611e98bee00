"""Logging of a service: loguru to stderr and to `logs/<service>.log`; the standard library's loggers are caught too.

Use `from loguru import logger` anywhere; only a service's `cli.py` calls `setup_logging`.
"""

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from loguru import logger

from runtime.base.printable import printable
from runtime.config.config import LogConfig
from runtime.run_dir.run_dir import RunDir

if TYPE_CHECKING:
    from loguru import FormatFunction, Message, Record


PRINTED = {"printed": True}
"""Bind this to a record whose text is on stderr already: it only goes to the log file."""

# Libraries log more than anyone reads: at our INFO they may only warn.
_LIBRARY_LEVELS = {"TRACE": logging.DEBUG, "DEBUG": logging.INFO}


def start_logging() -> None:
    """Log to stderr until the config is known and `setup_logging` takes over."""
    logger.remove()
    _add_stderr(LogConfig(), rank=None)


def setup_logging(service: str, config: LogConfig, run_dir: RunDir | None, *, rank: int | None = None) -> None:
    """Send all log records of this process to stderr and, given a run directory, to `logs/<name>.log`.

    `rank` is for services with several processes: it is part of each line, and of the file's name from rank 1 on.
    """
    name = service if not rank else f"{service}-{rank}"
    logger.remove()
    logger.configure(extra={"service": name}, patcher=_make_printable)
    _add_stderr(config, rank)
    if run_dir is not None:
        logger.add(
            LogFile(run_dir.logs / f"{name}.log"),
            level=config.level,
            format=_text_format(rank, date=True),
            backtrace=False,
            diagnose=False,  # values of variables may be secrets
        )
    logging.basicConfig(handlers=[_ToLoguru()], level=_LIBRARY_LEVELS.get(config.level, logging.WARNING), force=True)
    logging.captureWarnings(True)


def _make_printable(record: "Record") -> None:
    """Messages quote models and environments, which may have written escape sequences for the reader's terminal."""
    record["message"] = printable(record["message"])


def _add_stderr(config: LogConfig, rank: int | None) -> None:
    logger.add(
        _JsonLines() if config.json_lines else sys.stderr,
        level=config.level,
        format="{message}\n{exception}" if config.json_lines else _text_format(rank),
        filter=lambda record: "printed" not in record["extra"],
        backtrace=False,
        diagnose=False,
    )


def _text_format(rank: int | None, *, date: bool = False) -> "FormatFunction":
    time = "{time:YYYY-MM-DD HH:mm:ss.SSS}" if date else "<dim>{time:HH:mm:ss}</dim>"
    who = "" if rank is None else f"[rank {rank}] "
    template = f"{time} <level>{{level: <8}}</level> {who}{{message}}\n{{exception}}"
    return lambda record: template


class _JsonLines:
    """Prints each record as one JSON object."""

    def write(self, message: "Message") -> None:
        record = message.record
        line: dict[str, object] = {"time": record["time"].isoformat(), "level": record["level"].name}
        line |= record["extra"]
        line["message"] = record["message"]
        if record["exception"] is not None:
            line["exception"] = str(message).removeprefix(record["message"]).strip()
        sys.stderr.write(json.dumps(line, default=str) + "\n")


class _ToLoguru(logging.Handler):
    """Hands records of the standard library to loguru."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            level: str | int = logger.level(record.levelname).name
        except ValueError:  # a level that only the library knows
            level = record.levelno
        logger.opt(exception=record.exc_info).log(level, "{}: {}", record.name, record.getMessage())


class LogFile:
    """Appends text to `path`; at `max_bytes` it becomes `<path>.1`, older ones move up, `keep` of them stay.

    A disk that refuses is reported once on stderr; later lines are dropped until writing works again.
    """

    def __init__(self, path: Path, *, max_bytes: int = 64 << 20, keep: int = 3) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._warned = False

    def write(self, text: str) -> None:
        """Append `text`. Opened anew each time: rotation by other tools and deleted run directories do no harm."""
        try:
            with self._path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(text)
                size = file.tell()
            if size >= self._max_bytes:
                self._rotate()
        except OSError as error:
            if not self._warned:
                self._warned = True
                sys.stderr.write(f"cannot write {self._path}: {error.strerror}; logging to stderr only\n")

    def _rotate(self) -> None:
        for number in range(self._keep - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.replace(self._numbered(number + 1))
        self._path.replace(self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
