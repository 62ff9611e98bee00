"""Metrics of a run, read back from the files that its services wrote."""

from pathlib import Path

from runtime.metrics.progress import MetricRow, MetricTail


def read_metrics(path: Path) -> list[MetricRow]:
    """All whole lines of a metrics file, oldest first; a torn line of a killed process is skipped."""
    return MetricTail(path).read()
