"""Why the reward moved, for somebody who sees a run for the first time: one group, a good and a bad rollout of it.

The group is taken from the first part of the run, where most was learnt: rewards differ as much as they can, and the
tokens of a rollout above and of one below the average were exported. Without an export, rollouts alone must do.
"""

from runtime.progress import REWARD, reward_change
from viewer.overview import last_step
from viewer.params import Params
from viewer.run import Json, Run
from viewer.run_index import Row

EARLY = 0.3
"""Share of the run that the group is taken from, if there is one."""

WITH_TOKENS = """
SELECT g.*, MAX(t.advantage) AS best, MIN(t.advantage) AS worst FROM groups AS g JOIN tokens AS t USING (group_id)
WHERE g.spread > 0 AND g.step <= ? GROUP BY g.step, g.group_id HAVING best > 0 AND worst < 0
ORDER BY g.spread DESC, ABS(g.reward_mean - (g.reward_min + g.reward_max) / 2), g.step LIMIT 1
"""
WITHOUT_TOKENS = """
SELECT * FROM groups WHERE spread > 0 AND step <= ? ORDER BY spread DESC, step LIMIT 1
"""
EXPORTED = "EXISTS (SELECT 1 FROM tokens AS t WHERE t.trajectory_id = r.trajectory_id AND t.step = r.step)"


def show_story(run: Run, params: Params) -> Json:
    """Rewards at both ends, and the ids of a telling group and of two of its rollouts (`None` without one)."""
    group = _find_group(run)
    story: Json = {"rewards": _rewards(run), "last_step": last_step(run), "group": group, "good": None, "bad": None}
    if group is not None:
        story |= {"good": _rollout(run, group, "DESC"), "bad": _rollout(run, group, "ASC")}
    return story


def _find_group(run: Run) -> Row | None:
    last = last_step(run)
    for query in (WITH_TOKENS, WITHOUT_TOKENS):
        for limit in (max(1, round(last * EARLY)), 2**62):
            if found := run.index.select(query, (limit,)):
                return found[0]
    return None


def _rollout(run: Run, group: Row, direction: str) -> str | None:
    """The best or the worst member, rather one whose tokens are there."""
    query = (
        f"SELECT step, line FROM rollouts AS r WHERE group_id = ? AND step = ? AND advantage IS NOT NULL "
        f"ORDER BY {EXPORTED} DESC, advantage {direction}, num_sampled_tokens DESC, line LIMIT 1"
    )
    found = run.index.select(query, (group["group_id"], group["step"]))
    return f"{found[0]['step']}.{found[0]['line']}" if found else None


def _rewards(run: Run) -> Json | None:
    """Mean reward of the first and of the last steps."""
    rows = run.metrics["orchestrator"]
    rewards = {int(row.get("step") or 0): reward for row in rows if (reward := row.get(REWARD)) is not None}
    change = reward_change(rewards)
    return None if change is None else {"first": change[0], "last": change[1]}
