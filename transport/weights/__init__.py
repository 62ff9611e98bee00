"""Weights from trainer ranks to engines over ZeroMQ."""
