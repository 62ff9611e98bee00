"""A policy version for engines: as files, served over ZeroMQ, or broadcast."""
