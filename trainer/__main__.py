"""`python -m trainer`, which is how torchrun starts a rank."""

from trainer.cli import main

main()
