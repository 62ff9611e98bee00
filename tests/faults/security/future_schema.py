"""`python -m tests.faults.security.future_schema MODULE ...`: run MODULE as if it came from a later release."""

import runpy
import sys

import transport.wire.manifest

FUTURE = 99

if __name__ == "__main__":
    transport.wire.manifest.SCHEMA_VERSION = FUTURE  # before anything that copies the constant is imported
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
