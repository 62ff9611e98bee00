"""`SmallDisk`: a file system of a few megabytes that a test can fill and empty while services write to it.

No half file under a final name: everything in a run directory that another process may read is whole.
"""

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inference.weights.publish import read_publish
from trainer.checkpoints.manifest import MANIFEST_NAME, read_manifest, verify_files
from transport.outbox.outbox import BatchFile
from transport.wire.weights import read_weight_manifest

_CHUNK = bytes(64 << 10)

_PAGE = bytes(4 << 10)


class SmallDisk:
    """A mounted tmpfs. `path` is free for use; the ballast is beside it."""

    def __init__(self, mount_point: Path) -> None:
        self.path = mount_point / "runs"
        self.path.mkdir()
        self._ballast = mount_point / "ballast"

    @property
    def free_bytes(self) -> int:
        """Room that is left."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def fill(self, leave_bytes: int = 0) -> None:
        """Leave no more room than that. Called again, it takes what was given back meanwhile, too."""
        with suppress_full(), self._ballast.open("ab", buffering=0) as file:
            for chunk in (_CHUNK, _PAGE):
                while self.free_bytes >= leave_bytes + len(chunk):
                    if file.write(chunk) < len(chunk):
                        break

    def empty(self) -> None:
        """Give the room back."""
        self._ballast.unlink(missing_ok=True)


@contextmanager
def suppress_full() -> Iterator[None]:
    """Somebody else took the last page."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


@contextmanager
def small_disk(mount_point: Path, num_megabytes: int) -> Iterator[SmallDisk]:
    """Mount it while the block lasts. Without the right to mount this is a failure, not a skipped test."""
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_megabytes}m", "tmpfs", str(mount_point)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"tests of full disks need the right to mount a tmpfs: {done.stderr.strip()}"
    try:
        yield SmallDisk(mount_point)
    finally:
        with suppress(FileNotFoundError):
            (mount_point / "ballast").unlink()
        subprocess.run(["umount", "--lazy", str(mount_point)], check=True, timeout=30)


def check_whole(run: Path) -> None:
    """Raises what the reader of a half file would raise. Files may come and go meanwhile."""
    for batch in sorted((run / "outbox").glob("step-*.batch")):
        file = BatchFile(batch)
        file.frames(range(file.manifest.num_samples))
    for path in (run / "state").glob("*.json"):
        json.loads(path.read_bytes())
    for path in (run / "checkpoints").glob(f"step-*/{MANIFEST_NAME}"):
        verify_files(path.parent, read_manifest(path.parent).files)
    for path in (run / "weights").glob("v*/manifest.json"):
        manifest = read_weight_manifest(path)
        read_publish(path, version=manifest.version, run_id=manifest.run_id)


def valid_checkpoints(run: Path) -> list[int]:
    """Steps with a whole checkpoint, ascending."""
    steps = []
    for path in sorted((run / "checkpoints").glob(f"step-*/{MANIFEST_NAME}")):
        manifest = read_manifest(path.parent)
        verify_files(path.parent, manifest.files)
        steps.append(manifest.step)
    return steps
