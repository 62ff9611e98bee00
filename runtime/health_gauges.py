"""`HealthGauges`: the numbers of `/health` as gauges of `/metrics`, measured when they are asked for."""

import re
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from runtime.health import Health


class HealthGauges(Collector):
    """`tandem_<service>_progress_age_s`, and `tandem_<service>_now_<fact>` for each number among the facts.

    `now` keeps them apart from metrics of the same name, which speak of the newest step.
    """

    def __init__(self, health: Health) -> None:
        self._health = health

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """All gauges. Facts come and go, so they are not described in advance."""
        prefix = f"tandem_{self._health.service}_"
        for fact, value in self._health.report().items():
            if isinstance(value, int | float):
                name = fact if fact == "progress_age_s" else f"now_{re.sub(r'[^A-Za-z0-9_]', '_', fact)}"
                yield GaugeMetricFamily(prefix + name, f"{fact}, now", float(value))

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing: the registry would otherwise collect once at registration."""
        return iter(())
