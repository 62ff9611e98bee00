"""Entry point of `python -m tiny_models`."""

import sys

from tiny_models.cli import main

sys.exit(main())
