"""How each documented command is executed: really, with `--dry-run`, or by checking what it names.

`HOW` maps the first words of a command to a function; the longest match counts. A command without one fails its test.
"""

import importlib.util
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

import inference.cli
import orchestrator.cli
import runtime.cli
import tiny_models.cli
import trainer.cli
import transport.cli
from runtime.config import parse_config
from tests.docs.pages import ROOT
from tests.docs.workspace import RUN, environment
from trainer.config import ExportConfig

Words = Sequence[str]
PLACEHOLDERS = {
    "RUN": str(RUN),
    "RUN2": str(RUN),
    "FILE": "BATCH",
    "DIR": "keys",
    "IMPORT_PATH": "my_advantages:over_the_median",
    "trainer.toml": "configs/copy_text/trainer.toml",
}
"""What a reader puts in place of these words."""
MENTIONS = {
    *("rl doctor", "rl view", "rl report", "orchestrator eval", "trainer --replay", "inference --engine vllm"),
    *("rl view --host", "python -m <service>", "python -m tiny_models --task colour"),
    *("trainer check-loss", "orchestrator check-advantage"),
}
"""Names of commands in running text, without the arguments that they need."""
CONSOLE: dict[str, Callable[[Words], int | None]] = {
    "inference": inference.cli.run,
    "orchestrator": orchestrator.cli.run,
    "rl": runtime.cli.run,
    "trainer": trainer.cli.run,
    "transport": transport.cli.main,
}
_OPTIONAL = re.compile(r" \[[^\]]*\]")


def split(command: str) -> list[str]:
    """The words of a command line, with placeholders filled in; without comment, `&`, `[--options]` and `...`."""
    words = shlex.split(_OPTIONAL.sub("", command), comments=True)
    kept = [word for word in words if word not in ("&", "...")]
    while kept and re.match(r"[A-Z_]+=", kept[0]):
        del kept[0]
    return [_filled(word) for word in kept]


def _filled(word: str) -> str:
    word = PLACEHOLDERS.get(word, word)
    if word != "BATCH" and not re.search(r"outbox/step-\d+\.batch$", word):
        return word
    return str(max((RUN / "outbox").glob("step-*.batch")))


def execute(words: Words) -> None:
    """Run the command as `HOW` says. Raises, or fails, if it does not work."""
    matching = [prefix for prefix in HOW if tuple(words[: len(prefix)]) == prefix]
    assert matching, f"unknown command {shlex.join(words)!r}: say in tests/docs/execution.py how it is executed"
    HOW[max(matching, key=len)](words)


def really(words: Words) -> None:
    """In this process, by the function behind the console script."""
    code: object
    try:
        code = CONSOLE[words[0]](list(words[1:]))
    except SystemExit as stop:
        code = stop.code
    assert code in (0, None)


def dry(words: Words) -> None:
    """The config is resolved and printed; nothing starts."""
    really(words if {"--dry-run", "--help"} & set(words) else [*words, "--dry-run"])


def dry_replay(words: Words) -> None:
    """Of a trainer that has a config, which the text leaves out."""
    dry([words[0], "@", "configs/copy_text/trainer.toml", *words[1:]])


def dry_under_torchrun(words: Words) -> None:
    """Torchrun's own options by its own parser, the rest by the trainer."""
    from torch.distributed.run import get_args_parser

    at = words.index("-m")
    get_args_parser().parse_args([*words[1:at], "script"])
    assert words[at + 1] == "trainer"
    dry(words[at + 1 :])


def keys(words: Words) -> None:
    """Further clients need the keys that the plain command makes."""
    if len(words) > 3:
        really(words[:3])
    really(words)
    assert (Path(words[2]) / "server.secret").is_file()


def export(words: Words) -> None:
    """The folder that it names is a model afterwards."""
    really(words)
    assert (Path(words[words.index("--out") + 1]) / "config.json").is_file()


def parse_export(words: Words) -> None:
    """Only its arguments: an adapter needs a run with LoRA (tests/integration/test_lora.py exports one)."""
    parse_config(ExportConfig, list(words[2:]), prog="trainer export")


def view(words: Words) -> None:
    """To a terminal at once; else the page is served, fetched, and the server stopped as by Ctrl-C."""
    if "--terminal" in words:
        return really(words)
    script = str(Path(sys.executable).parent / "rl")
    command = [script, *words[1:], "--port", "0"]
    with subprocess.Popen(command, env=environment(Path.cwd()), stdout=subprocess.PIPE, text=True) as server:
        deadline = threading.Timer(120, server.kill)
        deadline.start()
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[0]
            with urllib.request.urlopen(address, timeout=60) as page:
                assert page.status == 200
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=60) == 0
        finally:
            deadline.cancel()
            server.kill()
    return None


def make_model(words: Words) -> None:
    """The model of the short run is there already; the command finds that it is the one that was asked for."""
    assert tiny_models.cli.main(list(words[3:])) == 0


def make(words: Words) -> None:
    """Make knows the target and everything that it needs."""
    command = ["make", "--dry-run", *words[1:]]
    done = subprocess.run(command, cwd=ROOT, env=environment(ROOT), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def module(words: Words) -> None:
    """Benchmarks take minutes: the module exists and knows the options."""
    spec = importlib.util.find_spec(words[2])
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert all(f'"{word}"' in source for word in words[3:] if word.startswith("--"))


def compose(words: Words) -> None:
    """No Docker engine here: the profiles exist (tests/deploy looks at the rest)."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"].values()
    known = {profile for service in services for profile in service.get("profiles", ())}
    assert {words[at + 1] for at, word in enumerate(words) if word == "--profile"} <= known


def pip_install(words: Words) -> None:
    """Installs nothing: our extras exist, and torch is the version that the Makefile installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in words[2:]:
        name, extras, version = re.fullmatch(r"(\.|[\w-]+)(?:\[([\w,-]+)\])?(?:==([\d.]+))?", requirement).groups()  # type: ignore[union-attr]
        assert name in (".", project["name"], "torch")
        assert set((extras or "").split(",")) - {""} <= set(project["optional-dependencies"])
        assert version is None or f"TORCH_VERSION := {version}\n" in (ROOT / "Makefile").read_text()


def tensorboard(words: Words) -> None:
    """Serves until it is stopped: it is installed, and the run wrote the folder."""
    assert shutil.which("tensorboard", path=environment(Path.cwd())["PATH"])
    assert list(Path(words[words.index("--logdir") + 1]).rglob("events.out.tfevents.*"))


def activate(words: Words) -> None:
    """The environment is where make puts it."""
    assert words[1] == ".venv/bin/activate"
    assert "VENV ?= .venv\n" in (ROOT / "Makefile").read_text()


def files_exist(words: Words) -> None:
    """Programs that are not ours: the files of the repository that they are given exist."""
    named = [word for word in words[1:] if word.startswith(("deploy/", "docker/", "configs/"))]
    assert all((ROOT / word).exists() for word in named)


HOW: dict[tuple[str, ...], Callable[[Words], None]] = {
    ("rl", "@"): dry,
    ("rl", "keys"): keys,
    ("rl", "doctor"): really,
    ("rl", "report"): really,
    ("rl", "view"): view,
    ("inference",): dry,
    ("orchestrator", "@"): dry,
    ("orchestrator", "eval"): dry,
    ("orchestrator", "ledger"): really,
    ("orchestrator", "check-advantage"): really,
    ("trainer", "@"): dry,
    ("trainer", "--replay"): dry_replay,
    ("trainer", "export"): export,
    ("trainer", "export", "--run", "runs/copy-text-lora"): parse_export,
    ("trainer", "check-loss"): really,
    ("transport", "inspect"): really,
    ("torchrun",): dry_under_torchrun,
    ("python", "-m", "tiny_models"): make_model,
    ("python", "-m", "runtime.config_reference"): module,  # its output is compared by the tests of runtime
    ("python", "-m", "sglang.launch_server"): files_exist,
    ("make",): make,
    ("pip", "install"): pip_install,
    ("docker", "compose"): compose,
    ("tensorboard",): tensorboard,
    ("source",): activate,
    ("openssl",): files_exist,
    ("sbatch",): files_exist,
    ("sky",): files_exist,
    ("kubectl",): files_exist,
    **{("python", "-m", f"benchmarks.{path.stem}"): module for path in (ROOT / "benchmarks").glob("[a-z]*.py")},
}
