"""`Once`: costly things of a test session are made once, not once in each of the processes that run it side by side."""

import fcntl
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Once:
    """Folders below `root`, which all processes of the session share."""

    root: Path

    def __call__(self, name: str, make: Callable[[Path], object]) -> Path:
        """The folder `name`, filled by `make` unless it is there already; nobody changes it afterwards.

        Who comes while another process makes it waits, at most until the deadline of the test. What `make` left when it
        failed is thrown away, and the next who asks tries again.
        """
        self.root.mkdir(exist_ok=True)
        folder, done = self.root / name, self.root / f"{name}.done"
        with (self.root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder
