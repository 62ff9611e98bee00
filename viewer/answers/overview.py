"""A run as a whole, as answers for a page: figures, batches, services, fates, and why the reward moved."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from runtime.doctor.diagnosis import LAUNCHER, Condition, diagnose
from runtime.doctor.evidence import gather_evidence
from runtime.doctor.view import as_json, own_facts
from runtime.metrics.progress import REWARD, MetricRow, reward_change
from transport.wire.ledger import Record, tally
from viewer.answers.curves import charts, metric_names, one_metric
from viewer.answers.params import PAGE_ROWS, Params, page_offset
from viewer.errors import ViewerError
from viewer.index.records import read_spans
from viewer.index.run import Json, Run
from viewer.index.run_index import Row

LIVE = {Condition.WORKING, Condition.WAITING, Condition.STARTING, Condition.STALLED, Condition.FROZEN}
LEDGER = "rollouts.jsonl"
OF_TRAINER = ("loss", "grad_norm", "tokens/global", "tokens_per_s", "staleness/max", "time/step_s")


def show_overview(run: Run, params: Params) -> Json:
    counts = {
        table: run.index.select(f"SELECT COUNT(*) AS total FROM {table}")[0]["total"]
        for table in ("rollouts", "groups", "tokens")
    }
    envs = run.index.select("SELECT DISTINCT env_name FROM groups UNION SELECT DISTINCT env_name FROM tokens")
    return {
        "name": run.name,
        "path": str(run.dir.path),
        "envs": sorted(str(row["env_name"]) for row in envs),
        "last_step": last_step(run),
        "counts": counts,
        "fates": count_fates(run.dir.ledger / LEDGER),
    }


def show_curves(run: Run, params: Params) -> Json:
    return {"charts": charts(run.metrics)}


def show_metric(run: Run, params: Params) -> Json:
    """The curve of the metric `id` (`service: key`), and the names of all metrics there are."""
    name = params.get("id", "")
    return {"names": metric_names(run.metrics), "series": one_metric(run.metrics, name)}


def show_batches(run: Run, params: Params) -> Json:
    """One page of steps, newest first: what was generated, what of it was trained, what came of it."""
    query = (
        "SELECT step, COUNT(*) AS num_rollouts, SUM(substr(state, 1, 7) = 'trained') AS num_trained, "
        "SUM(substr(state, 1, 8) = 'filtered') AS num_filtered, COUNT(failure) AS num_failed, "
        "COUNT(DISTINCT group_id) AS num_groups, AVG(reward) AS reward_mean, MIN(oldest_version) AS oldest_version, "
        "SUM(num_sampled_tokens) AS num_sampled_tokens FROM rollouts GROUP BY step ORDER BY step DESC LIMIT ? OFFSET ?"
    )
    rows = run.index.select(query, (PAGE_ROWS, page_offset(params)))
    trained = {int(row.get("step") or 0): row for row in run.metrics["trainer"]}
    total = run.index.select("SELECT COUNT(DISTINCT step) AS total FROM groups")[0]["total"]
    batches = [row | {"trainer": _picked(trained.get(int(row["step"] or 0)))} for row in rows]
    return {"total": total, "page_rows": PAGE_ROWS, "batches": batches}


def show_circle(run: Run, params: Params) -> Json:
    """Who lives, and who waits for whom: what `rl doctor` says. Asks the services, with a deadline."""
    if not run.dir.services.is_dir():
        raise ViewerError("the run directory has no folder `services`")
    evidence = gather_evidence(run.dir)
    diagnosis = diagnose(evidence)
    services = [
        {
            "name": service.name,
            "condition": diagnosis.conditions[service.name],
            "progress_age_s": service.health.get("progress_age_s"),
            "facts": own_facts(service),
            "ended": service.ended,
        }
        for service in evidence.services
        if service.name != LAUNCHER
    ]
    is_live = any(condition in LIVE for condition in diagnosis.conditions.values())
    return as_json(evidence, diagnosis) | {"is_live": is_live, "services": services}


def last_step(run: Run) -> int:
    """The newest step that the trainer reported, or, without a trainer, that was cut."""
    for service in ("trainer", "orchestrator"):
        if rows := run.metrics[service]:
            return max(int(row.get("step") or 0) for row in rows)
    return int(run.index.select("SELECT MAX(step) AS step FROM groups")[0]["step"] or 0)


def _picked(row: MetricRow | None) -> dict[str, float | None]:
    return {} if row is None else {key: row[key] for key in OF_TRAINER if key in row}


_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def count_fates(path: Path) -> dict[str, int]:
    """The same sums as `orchestrator ledger`, which also checks them.

    Rollouts by fate (`trained`, `filtered:...`, `failed:...`, `cancelled`, `in_flight`); empty without a ledger."""
    counts: Counter[str] = Counter()
    for state, count in tally(_records(path)).states.items():
        counts[state.partition("@")[0]] += count
    return dict(counts.most_common())


def _records(path: Path) -> Iterator[Record]:
    with suppress(OSError):
        for _, line in read_spans(path):
            with suppress(msgspec.MsgspecError):  # torn by a kill, or of a newer version
                yield _decoder.decode(line)


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
    """Rewards at both ends, and the ids of a telling group and of two of its rollouts (`None` without one).

    The group is taken from the first part of the run, where most was learnt: rewards differ as much as they can, and
    the tokens of a rollout above and of one below the average were exported. Without an export, rollouts alone must
    do.
    """
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
