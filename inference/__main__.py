"""`python -m inference`."""

from inference.cli import main

main()
