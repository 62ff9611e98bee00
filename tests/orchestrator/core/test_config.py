"""The config's rules: a mistake is named, with the key."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.orchestrator.core.toys import make_config

BAD: list[tuple[dict[str, Any], str]] = [
    ({"envs": []}, "envs"),
    ({"envs": [{"id": "all"}]}, '"all" is reserved'),
    ({"envs": [{"id": "toy", "name": "all"}]}, '"all" is reserved'),
    ({"envs": [{"id": "toy"}, {"id": "owner/toy"}]}, "names must differ"),
    ({"envs": [{"id": "toy", "group_size": 1}]}, "needs group_size >= 2"),
    ({"envs": [{"id": "toy", "group_size": 65}]}, "max_in_flight"),
    ({"envs": [{"id": "toy", "ratio": 0}]}, "ratio"),
    ({"advantage": {"type": "gae"}}, "grpo"),
    ({"max_error_rate": 1.5}, "max_error_rate"),
    ({"max_staleness": -1}, "max_staleness"),
    ({"batchsize": 3}, "batchsize"),
]


@pytest.mark.parametrize(("changes", "named"), BAD)
def test_a_wrong_value_is_refused_and_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        make_config(tmp_path, **changes)


def test_the_label_of_an_environment_is_its_name_or_its_id_without_owner(tmp_path: Path) -> None:
    config = make_config(tmp_path, envs=[{"id": "owner/toy"}, {"id": "toy", "name": "mine"}])
    assert [env.label for env in config.envs] == ["toy", "mine"]
