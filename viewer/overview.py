"""A run as a whole: its name and figures, its batches, its services, as answers for a page."""

from runtime.doctor_diagnosis import LAUNCHER, Condition, diagnose
from runtime.doctor_evidence import gather_evidence
from runtime.doctor_view import as_json, own_facts
from runtime.metric_tail import Row as MetricRow
from viewer.curves import charts, metric_names, one_metric
from viewer.errors import ViewerError
from viewer.fates import count_fates
from viewer.params import PAGE_ROWS, Params, page_offset
from viewer.run import Json, Run

LIVE = {Condition.WORKING, Condition.WAITING, Condition.STARTING, Condition.STALLED, Condition.FROZEN}
LEDGER = "rollouts.jsonl"
OF_TRAINER = ("loss", "grad_norm", "tokens/global", "tokens_per_s", "staleness/max", "time/step_s")


def show_overview(run: Run, params: Params) -> Json:
    """Names and totals."""
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
    """All curves."""
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
