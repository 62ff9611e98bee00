"""`python -m tests.faults.liveness.light_trainer ENDPOINT RUN STEP_S`: a trainer without a model, for long runs.

Fetches every sample, "trains" for STEP_S seconds, announces the version and commits. Ends with the run.
"""

import sys
import time

from transport.client.client import BatchClient


def main(endpoint: str, run_id: str, step_s: float) -> None:
    with BatchClient(endpoint, run_id) as client:
        step = client.hello()
        while (manifest := client.manifest(step)) is not None:
            client.samples(manifest, range(manifest.num_samples))
            time.sleep(step_s)  # the optimizer: what is slow here is the thing under test
            client.weights_published(step, f"weights/v{step}", f"digest-{step}")
            client.trained(step)
            client.committed(step)
            print(step, flush=True)
            step += 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
