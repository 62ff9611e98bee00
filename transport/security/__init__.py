"""CURVE keys, sockets that use them, and which addresses other machines can reach."""
