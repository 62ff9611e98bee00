"""`rl keys DIR [CLIENT ...]`: make the CURVE keys of the link between orchestrator and trainer.

rl keys keys                 server.* for the orchestrator, client.* for the trainer
rl keys keys client-b        another client in the same folder: one more name on the allow-list
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from runtime.errors import UserError
from transport.errors import SecurityError
from transport.security.keys import make_keys

USAGE = "usage: rl keys DIR [CLIENT ...] (for example: rl keys keys, and later: rl keys keys client-b)"
_CLIENT_NAME = re.compile(r"client[A-Za-z0-9._-]*")

ADVICE = """
The orchestrator needs server.secret, server.public and every client*.public (its allow-list):
    orchestrator ... --server.keys-dir {folder}
A trainer needs its own pair and server.public; copy these three, and nothing else, to its machine:
{copies}
Secrets have mode 0600 and stay so; nobody needs a secret but its owner. To lock a client out, remove its .public
from the orchestrator's folder and restart the orchestrator.
"""


def keys(argv: Sequence[str]) -> int:
    """Make the keys that `argv` asks for and say what goes where. Raises `UserError`; overwrites nothing."""
    if list(argv) in (["--help"], ["-h"]):
        sys.stdout.write(USAGE + "\n")
        return 0
    if not argv or any(word.startswith("-") for word in argv):
        raise UserError(USAGE)
    folder, clients = Path(argv[0]), tuple(argv[1:])
    wrong = [name for name in clients if not _CLIENT_NAME.fullmatch(name)]
    if wrong:
        raise UserError(f"{wrong[0]!r} is not a client name: it must begin with `client`; {USAGE}")
    if clients and not (folder / "server.public").is_file():
        raise UserError(f"{folder} has no server.public: make the first keys with `rl keys {folder}`")
    made = "".join(f"made {path}\n" for path in _make(folder, clients or ("server", "client")))
    copies = "\n".join(_copies(folder, name) for name in clients or ("client",))
    sys.stdout.write(made + ADVICE.format(folder=folder, copies=copies))
    return 0


def _make(folder: Path, names: tuple[str, ...]) -> list[Path]:
    try:
        return make_keys(folder, names)
    except SecurityError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"cannot make keys in {folder}: {error.strerror}") from error


def _copies(folder: Path, name: str) -> str:
    own_name = "" if name == "client" else f" --orchestrator.key-name {name}"
    files = " ".join(str(folder / file) for file in (f"{name}.secret", f"{name}.public", "server.public"))
    return f"    {files}\n    trainer ... --orchestrator.keys-dir FOLDER{own_name}"
