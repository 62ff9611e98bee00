"""The network that is trained: loading, attention over packed rows, sharding, adapters, scores of tokens."""
