"""All config classes of the trainer. Imports no torch."""
