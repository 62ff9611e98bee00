"""The critic: what a state is worth, and the advantages and value targets that follow from it."""
