"""`python -m orchestrator.envs.workers FD`: started by `WorkerProcess`, never by hand."""

import sys

from orchestrator.envs.workers.child import main

if __name__ == "__main__":
    main(int(sys.argv[1]))
