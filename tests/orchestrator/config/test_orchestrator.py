"""The config's rules: a mistake is named, with the key."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.config.orchestrator import OrchestratorConfig
from orchestrator.groups.scoring import group_rules
from orchestrator.values.rollout import TokenWeights
from runtime.config.config import resolved_json
from tests.orchestrator.toys import make_config

BAD: list[tuple[dict[str, Any], str]] = [
    ({"envs": []}, "envs"),
    ({"envs": [{"id": "all"}]}, '"all" is reserved'),
    ({"envs": [{"id": "toy", "name": "all"}]}, '"all" is reserved'),
    ({"envs": [{"id": "toy"}, {"id": "owner/toy"}]}, "names must differ"),
    ({"envs": [{"id": "toy", "name": "maths/easy"}]}, "'maths/easy' is not a name"),
    ({"eval": {"envs": [{"id": "toy", "name": "all"}]}}, 'eval.envs: the name "all" is reserved'),
    ({"eval": {"envs": [{"id": "owner/all"}]}}, 'eval.envs: the name "all" is reserved'),
    ({"envs": [{"id": "toy", "group_size": 1}]}, "'toy' needs group_size >= 2"),
    ({"envs": [{"id": "toy", "group_size": 1, "advantage": {"type": "rloo"}}]}, "'rloo'.*'toy' needs group_size >= 2"),
    (
        {"envs": [{"id": "toy", "min_group_size": 1}], "advantage": {"type": "rloo"}},
        "'rloo' needs at least 2 rollouts of a group: 'toy' has min_group_size = 1",
    ),
    ({"envs": [{"id": "toy", "group_size": 4, "min_group_size": 5}]}, "min_group_size \\(5\\) of 'toy' is above"),
    (
        {"envs": [{"id": "toy", "failure_policy": "drop_group", "min_group_size": 2}]},
        "leaves min_group_size no meaning",
    ),
    ({"envs": [{"id": "toy", "failure_policy": "ignore"}]}, "failure_policy"),
    ({"envs": [{"id": "toy", "failure_policy": "retry", "max_tries": 1}]}, "max_tries"),
    ({"algorithm": {"type": "opd", "teacher": "big"}}, "'opd' of 'toy' names teacher 'big', but teachers has none"),
    (
        {
            "envs": [{"id": "toy", "algorithm": {"type": "sft", "teacher": "big"}, "advantage": {"type": "grpo"}}],
            "teachers": {"big": {"url": "http://127.0.0.1:1"}},
        },
        "sets advantage 'grpo', which algorithm 'sft' does not use",
    ),
    ({"teachers": {"big": {"url": "localhost:1"}}}, "url"),
    ({"algorithm": {"type": "dpo"}}, "'rl', 'sft', 'opd'"),
    ({"envs": [{"id": "toy", "group_size": 65}]}, "max_in_flight"),
    ({"envs": [{"id": "toy", "ratio": 0}]}, "ratio"),
    (
        {"advantage": {"type": "gae"}},
        "'gae'.*'grpo', 'dr_grpo', 'rloo', 'maxrl', 'reinforce_pp', 'ppo', 'custom'",
    ),
    ({"envs": [{"id": "toy", "advantage": {"type": "gae"}}]}, "'reinforce_pp'"),
    ({"max_error_rate": 1.5}, "max_error_rate"),
    ({"max_staleness": -1}, "max_staleness"),
    ({"staleness_policy": "withhold"}, "staleness_policy\n.*'wait' or 'drop'.*'withhold'"),
    ({"batchsize": 3}, "batchsize"),
]


@pytest.mark.parametrize(("changes", "named"), BAD)
def test_a_wrong_value_is_refused_and_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        make_config(tmp_path, **changes)


def test_the_label_of_an_environment_is_its_name_or_its_id_without_owner(tmp_path: Path) -> None:
    config = make_config(tmp_path, envs=[{"id": "owner/toy"}, {"id": "toy", "name": "mine"}])
    assert [env.label for env in config.envs] == ["toy", "mine"]


def test_an_environment_may_have_its_own_advantage_algorithm_and_failure_policy(tmp_path: Path) -> None:
    envs = [
        {"id": "toy"},
        {"id": "toy", "name": "rloo", "advantage": {"type": "rloo"}, "failure_policy": "retry", "max_tries": 5},
        {"id": "toy", "name": "ppo", "advantage": {"type": "ppo"}, "group_size": 1},
        {"id": "toy", "name": "opd", "algorithm": {"type": "opd", "teacher": "big"}, "group_size": 1},
        {"id": "toy", "name": "three", "min_group_size": 3},
    ]
    config = make_config(tmp_path, envs=envs, teachers={"big": {"url": "http://127.0.0.1:1"}})
    assert [config.advantage_of(env).type for env in config.envs] == ["grpo", "rloo", "ppo", "grpo", "grpo"]
    assert [config.algorithm_of(env).type for env in config.envs] == ["rl", "rl", "rl", "opd", "rl"]
    assert [config.min_survivors_of(env) for env in config.envs] == [2, 2, 1, 1, 3]
    assert [env.num_tries for env in config.envs] == [1, 5, 1, 1, 1]
    rules = group_rules(config)
    assert [rule.advantage.name for rule in rules.values()] == ["grpo", "rloo", "ppo", "grpo", "grpo"]
    assert rules["opd"].weights == TokenWeights(rl=0.0, ref_kl=1.0)


def test_a_resolved_config_can_be_loaded_again(tmp_path: Path) -> None:
    config = make_config(tmp_path, teachers={"big": {"url": "http://127.0.0.1:1"}})
    assert OrchestratorConfig(**json.loads(resolved_json(config))) == config
