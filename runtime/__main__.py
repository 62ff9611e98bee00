"""Entry point of `python -m runtime`: the `rl` command."""

from runtime.cli import main

main()
