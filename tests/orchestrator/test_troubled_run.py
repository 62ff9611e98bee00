"""A run with real environments: one raises in 30 % of its rollouts, one hangs, and one scores groups jointly."""

import re
from pathlib import Path

import numpy as np
import pytest

from chat.branch import Int32s
from chat.tokenizer import Tokenizer
from orchestrator.engines.scripted import ScriptedEngine
from orchestrator.envs.loading import load_env
from orchestrator.records.ledger import LEDGER_NAME, read_ledger
from tests.orchestrator.toys import make_config, run_toy
from tests.support.metrics import read_metrics
from transport.wire.generation import GenerateRequest
from transport.wire.ledger import tally

RAISES = {"id": "flaky-text", "name": "raises", "args": {"task": {"raise_rate": 0.3}}}
HANGS = {
    "id": "flaky-text",
    "name": "hangs",
    "args": {"task": {"raise_rate": 0.0, "hang_rate": 0.1}},
    "rollout_timeout_s": 0.5,
}
JOINT = {"id": "group-race", "name": "joint", "rollout_timeout_s": 30.0}


def copier(tokenizer: Tokenizer) -> ScriptedEngine:
    """Copies the word in the prompt, rightly or with a wrong end, as the seed says."""
    end = min(tokenizer.eos_ids)

    def script(request: GenerateRequest) -> Int32s:
        found = re.search(r"copy: (\w+)", tokenizer.decode(request.token_ids.numpy()))
        assert found is not None
        seed = request.seed or 0
        letters = "abcdefghij"[seed // 2 % 10] + "abcdefghij"[seed // 20 % 10]
        reply = found[1] if seed % 2 else found[1][:-2] + letters
        return np.append(tokenizer.encode(reply), end).astype(np.int32)

    return ScriptedEngine(tokenizer.vocab_size, end, script=script)


@pytest.mark.parametrize("policy", [{}, {"failure_policy": "retry", "max_tries": 2}])
async def test_trouble_in_environments_is_survived_counted_and_told(
    tokenizer: Tokenizer, tmp_path: Path, policy: dict[str, object]
) -> None:
    common = {"group_size": 6, "sampling": {"max_tokens": 16}, **policy}
    envs = [env | common for env in (RAISES, HANGS, JOINT)]
    config = make_config(tmp_path, envs=envs, batch_size=24, max_steps=6, max_staleness=1)
    engine = copier(tokenizer)
    trainer = await run_toy(config, engine, [load_env(env, engine, tokenizer) for env in config.envs])
    assert sorted(trainer.batches) == [1, 2, 3, 4, 5, 6]
    samples = [sample for batch in trainer.batches.values() for sample in batch]
    assert {sample.env_name for sample in samples} == {"raises", "hangs", "joint"}
    groups: dict[str, set[str]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, set()).add(sample.trajectory_id)
    sizes = {group_id: len(members) for group_id, members in groups.items()}
    assert {size for group_id, size in sizes.items() if group_id.startswith("joint/")} == {6}
    assert min(sizes.values()) < 6, "no partial group shipped"

    result = tally(read_ledger(config.run.path / "ledger" / LEDGER_NAME))
    assert result.balances, result.problems
    assert not result.states["in_flight"]
    assert result.states["failed:env_error"] > 0
    assert result.states["failed:env_timeout"] > 0

    rows = read_metrics(config.run.path / "metrics" / "orchestrator.jsonl")
    total = {key: sum(row.get(key) or 0.0 for row in rows) for row in rows for key in row}
    assert total["failures/raises/env_error"] > 0
    assert total["failures/hangs/env_timeout"] > 0
    assert "failures/joint/env_error" not in total
    shares = [row["failures/raises/share"] for row in rows if "failures/raises/share" in row]
    assert 0.1 < float(np.mean([share or 0.0 for share in shares])) < 0.5
    assert all(f"reward/{env}/mean" in total for env in ("all", "raises", "hangs", "joint"))
