"""`rl doctor RUN`: who waits for whom across the services of a live or dead run, and who is to blame."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from runtime.doctor_diagnosis import diagnose
from runtime.doctor_evidence import gather_evidence
from runtime.doctor_view import as_json, render
from runtime.errors import UserError
from runtime.exit_codes import ExitCode
from runtime.run_dir import RunDir

USAGE = "usage: rl doctor RUN_DIRECTORY [--json] (for example rl doctor runs/default)"


def doctor(argv: Sequence[str]) -> int:
    """Look at the run that `argv` names and say what is wrong with it: 0 if nothing is, else 1."""
    words = [word for word in argv if word != "--json"]
    if words in (["--help"], ["-h"]):
        sys.stdout.write(USAGE + "\n")
        return ExitCode.OK
    if len(words) != 1 or words[0].startswith("-"):
        raise UserError(USAGE)
    run_dir = RunDir(Path(words[0]))
    if not run_dir.services.is_dir():
        raise UserError(f"{run_dir.path} is not a run directory: it has no folder `services`")
    evidence = gather_evidence(run_dir)
    diagnosis = diagnose(evidence)
    if "--json" in argv:
        sys.stdout.write(json.dumps(as_json(evidence, diagnosis), indent=2) + "\n")
    else:
        Console(highlight=False, soft_wrap=True).print(render(evidence, diagnosis))
    return ExitCode.OK if diagnosis.culprit is None else ExitCode.FAILED
