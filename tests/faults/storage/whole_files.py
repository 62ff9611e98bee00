"""No half file under a final name: everything in a run directory that another process may read is whole."""

import json
from pathlib import Path

from inference.weights.publish import read_publish
from trainer.checkpoints.manifest import MANIFEST_NAME, read_manifest, verify_files
from transport.outbox.batch_file import BatchFile
from transport.wire.weights import read_weight_manifest


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
