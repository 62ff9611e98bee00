"""Metrics by env are the numbers one would compute by hand, whatever order and portions they come in."""

import numpy as np
import pytest
import torch

from tests.trainer.rank_worker import CPU
from trainer.accounting import EnvStats

ENVS = ("copy", "reverse")


def test_summary_equals_numpy_for_each_env_and_for_all() -> None:
    rng = np.random.default_rng(0)
    values, envs = rng.normal(3, 2, 100), rng.integers(0, 2, 100)
    stats = EnvStats(("reward",), ENVS, CPU)
    for part in np.split(np.arange(100), [7, 8, 60]):
        stats.add("reward", torch.from_numpy(values[part]), torch.from_numpy(envs[part]))
    metrics = stats.totals().metrics()
    for key, chosen in (("all", values), ("copy", values[envs == 0]), ("reverse", values[envs == 1])):
        assert metrics[f"reward/{key}/mean"] == pytest.approx(chosen.mean())
        assert metrics[f"reward/{key}/std"] == pytest.approx(chosen.std())
        assert metrics[f"reward/{key}/min"] == pytest.approx(chosen.min())
        assert metrics[f"reward/{key}/max"] == pytest.approx(chosen.max())


def test_only_members_are_counted() -> None:
    stats = EnvStats(("ratio",), ENVS, CPU)
    stats.add("ratio", torch.tensor([1.0, 99.0, 3.0]), torch.tensor([0, 0, 0]), torch.tensor([True, False, True]))
    metrics = stats.totals().metrics()
    assert (metrics["ratio/copy/mean"], metrics["ratio/copy/max"]) == (2, 3)


def test_what_was_never_counted_is_left_out() -> None:
    stats = EnvStats(("reward", "entropy"), ENVS, CPU)
    stats.add("reward", torch.tensor([1.0]), torch.tensor([0]))
    stats.add("entropy", torch.tensor([1.0]), torch.tensor([0]), torch.tensor([False]))
    assert stats.totals().metrics().keys() == {
        f"reward/{env}/{kind}" for env in ("all", "copy") for kind in ("mean", "std", "min", "max")
    }


def test_equal_values_have_no_spread() -> None:
    stats = EnvStats(("reward",), ENVS, CPU)
    stats.add("reward", torch.full((1000,), 0.1), torch.zeros(1000, dtype=torch.int64))
    assert stats.totals().metrics()["reward/all/std"] == pytest.approx(0, abs=1e-7)


def test_flags_become_shares() -> None:
    stats = EnvStats(("is_masked",), ENVS, CPU)
    stats.add("is_masked", torch.tensor([True, False, False, False]), torch.tensor([1, 1, 1, 1]))
    assert stats.totals().metrics()["is_masked/reverse/mean"] == 0.25


def test_totals_of_two_steps_add_up_to_those_of_both_at_once() -> None:
    rng = np.random.default_rng(1)
    values, envs = torch.from_numpy(rng.normal(0, 1, 30)), torch.from_numpy(rng.integers(0, 2, 30))
    parts = [EnvStats(("reward",), ENVS, CPU) for _ in range(3)]
    for stats, chosen in zip(parts, (slice(0, 3), slice(3, 30), slice(0, 30)), strict=True):
        stats.add("reward", values[chosen], envs[chosen])
    first, second, both = (stats.totals() for stats in parts)
    assert (first + second).metrics() == pytest.approx(both.metrics())
