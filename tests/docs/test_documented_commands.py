"""Every command in README.md and docs/*.md works: run against one short real run, or dry-run.

`HOW` maps the first words of a command to the function that executes it: really, with `--dry-run`, or by checking what
it names. The longest match counts. A command without one fails its test.
"""

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import tiny_models.cli
from runtime.config.config import parse_config
from runtime.errors import UserError
from tests.cli.console import Words, resolve, run
from tests.docs.pages import FIRST_RUN, ROOT, RUN, Text, borrow, commands, environment, example_modules, lay_out
from trainer.config.trainer import ExportConfig

pytestmark = pytest.mark.integration

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
    assert matching, (
        f"unknown command {shlex.join(words)!r}: say in tests/docs/test_documented_commands.py how it is executed"
    )
    HOW[max(matching, key=len)](words)


def dry(words: Words) -> None:
    """The config is resolved and printed; nothing starts."""
    if "--help" in words:
        run(words)
    else:
        resolve(words)


def dry_replay(words: Words) -> None:
    """Of a trainer that has a config, which the text leaves out."""
    dry([words[0], "@", "configs/copy_text/trainer.toml", *words[1:]])


def keys(words: Words) -> None:
    """Further clients need the keys that the plain command makes."""
    if len(words) > 3:
        run(words[:3])
    run(words)
    assert (Path(words[2]) / "server.secret").is_file()


def export(words: Words) -> None:
    """The folder that it names is a model afterwards."""
    run(words)
    assert (Path(words[words.index("--out") + 1]) / "config.json").is_file()


def parse_export(words: Words) -> None:
    """Only its arguments: an adapter needs a run with LoRA (tests/integration/test_lora_and_ppo.py exports one)."""
    parse_config(ExportConfig, list(words[2:]), prog="trainer export")


def view(words: Words) -> None:
    """To a terminal, which ends by itself; tests/viewer/test_cli.py serves the page."""
    run([*words, *(() if "--terminal" in words else ("--terminal",))])


def make_model(words: Words) -> None:
    """The model of the short run is there already; the command finds that it is the one that was asked for."""
    assert tiny_models.cli.main(list(words[3:])) == 0


def make(words: Words) -> None:
    """Make knows the target and everything that it needs."""
    command = ["make", "--dry-run", *words[1:]]
    done = subprocess.run(command, cwd=ROOT, env=environment(ROOT), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def module(words: Words) -> None:
    """Benchmarks take minutes: the module exists."""
    assert importlib.util.find_spec(words[2]) is not None


def compose(words: Words) -> None:
    """No Docker engine here: the profiles exist (tests/deploy looks at the rest)."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"].values()
    known = {profile for service in services for profile in service.get("profiles", ())}
    assert {words[at + 1] for at, word in enumerate(words) if word == "--profile"} <= known


def files_exist(words: Words) -> None:
    """Programs that are not ours: the files of the repository that they are given exist."""
    named = [word for word in words[1:] if word.startswith(("deploy/", "docker/", "configs/"))]
    assert all((ROOT / word).exists() for word in named)


HOW: dict[tuple[str, ...], Callable[[Words], object]] = {
    ("rl", "@"): dry,
    ("rl", "keys"): keys,
    ("rl", "doctor"): run,
    ("rl", "report"): run,
    ("rl", "view"): view,
    ("inference",): dry,
    ("orchestrator", "@"): dry,
    ("orchestrator", "eval"): dry,
    ("orchestrator", "ledger"): run,
    ("orchestrator", "check-advantage"): run,
    ("trainer", "@"): dry,
    ("trainer", "--replay"): dry_replay,
    ("trainer", "export"): export,
    ("trainer", "export", "--run", "runs/copy-text-lora"): parse_export,
    ("trainer", "check-loss"): run,
    ("transport", "inspect"): run,
    ("torchrun",): dry,
    ("python", "-m", "tiny_models"): make_model,
    ("python", "-m"): module,
    ("python", "-m", "sglang.launch_server"): files_exist,
    ("make",): make,
    ("docker", "compose"): compose,
    **{(name,): files_exist for name in ("pip", "tensorboard", "source", "openssl", "sbatch", "sky", "kubectl")},
}


COMMANDS = [command for command in commands() if command.text not in MENTIONS]


@pytest.fixture
def no_example_modules_left() -> None:
    """Modules of the documentation are imported from another folder by every test."""
    for name, _ in example_modules():
        sys.modules.pop(name.removesuffix(".py"), None)
    importlib.invalidate_caches()


@pytest.mark.parametrize("command", COMMANDS, ids=str)
@pytest.mark.usefixtures("no_example_modules_left")
def test_documented_command_works(
    command: Text, first_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path)
    borrow(tmp_path, first_run, command)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", environment(tmp_path)["XDG_CACHE_HOME"])
    monkeypatch.syspath_prepend(tmp_path)
    execute(split(command.text))


def test_the_run_that_was_really_made_is_that_of_the_quick_start() -> None:
    assert FIRST_RUN in [command.text for command in COMMANDS if command.page in ("README.md", "quick-start.md")]


def test_a_key_that_does_not_exist_is_found() -> None:
    file = ROOT / "configs" / "copy_text" / "orchestrator.toml"
    with pytest.raises(UserError, match="stepps"):
        execute(["orchestrator", "@", str(file), "--max-stepps", "3"])
