"""The long form of the fault tests, with real processes. Figures go to `results/faults.json`, one section each.

    python -m benchmarks.faults exactly-once [--kills 200] [--seed 0] [--keep FOLDER]

`exactly-once`: kill -9 of orchestrator and trainer at random instants of fixed-seed runs with the scripted engine, each
of which must end with the weights, optimizer state and counts of a run without kills, and a ledger that balances. The
first run that does not ends the command with an error, and records nothing.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks.fault_results import RESULTS, Figures, record
from tests.faults.exactly_once.campaign import Campaign, make_model
from tests.faults.exactly_once.evidence import Result
from tests.faults.exactly_once.fixed_run import FixedRun
from tests.faults.exactly_once.kills import Aim, random_aim, random_end
from tests.faults.exactly_once.signs import SIGNS
from tests.support.nursery import Nursery

KILLS_PER_RUN = 7
"""Of each service, besides one at the end in every other run."""
COLD_SHARE = 0.05
"""Starts of a plain `python -m <service>`; the others are forks of a process that has imported it."""


def exactly_once(num_kills: int, seed: int, folder: Path) -> Figures:
    """Run until there were `num_kills` kills, half of each service. `AssertionError` if a run ends otherwise."""
    started = time.monotonic()
    fixed = FixedRun(folder / "runs", "run", make_model(folder / "model"))
    rng = random.Random(seed)
    with ExitStack() as stack:
        nurseries = {service: stack.enter_context(Nursery(service, COLD_SHARE)) for service in SIGNS}
        campaign = Campaign(fixed, nurseries)
        reference = campaign.reference().after(fixed.max_steps)
        while left := left_to_kill(campaign, num_kills):
            plan = {service: make_plan(service, left.get(service, 0), campaign.num_runs, rng) for service in SIGNS}
            result, ended = campaign.with_kills(plan)
            assert result == reference, f"run {campaign.num_runs} ended with {result}, not with {reference}"
            print(f"run {campaign.num_runs}: {ended.duration_s:.1f} s, {describe(campaign.hits)}", flush=True)
    return figures(campaign, reference, seed, time.monotonic() - started)


def make_plan(service: str, left: int, run: int, rng: random.Random) -> list[Aim]:
    """Kills of `service` in run number `run`, of which `left` are still to come."""
    aims = [random_aim(service, rng) for _ in range(min(KILLS_PER_RUN, left))]
    return [*aims, random_end(rng)] if run % 2 and left > KILLS_PER_RUN else aims


def left_to_kill(campaign: Campaign, num_kills: int) -> dict[str, int]:
    """Kills of each service that are still to come; empty when all are done."""
    goals = {service: num_kills // len(SIGNS) for service in SIGNS}
    return {service: goal - done for service, goal in goals.items() if (done := campaign.num_killed(service)) < goal}


def figures(campaign: Campaign, reference: Result, seed: int, duration_s: float) -> Figures:
    """What was measured. A run that ended otherwise than the reference has raised before."""
    run, accounts = campaign.run, campaign.accounts
    num_due = run.max_steps * len(accounts)
    return {
        "kills": sum(campaign.num_killed(service) for service in SIGNS),
        "kills_by_service": {service: campaign.num_killed(service) for service in SIGNS},
        "kills_by_instant": {service: dict(counter.most_common()) for service, counter in campaign.hits.items()},
        "runs_with_kills": campaign.num_runs,
        "runs_bit_equal_to_the_run_without_kills": campaign.num_runs,
        "steps_per_run": run.max_steps,
        "steps_between_checkpoints": run.checkpoint_steps,
        "steps_lost": num_due - sum(len(set(account.lineage)) for account in accounts),
        "steps_trained_twice": sum(len(account.lineage) - len(set(account.lineage)) for account in accounts),
        "steps_taken_back_and_trained_again": sum(account.num_vain_steps for account in accounts),
        "ledgers_balanced": len(accounts),
        "rollouts_generated_again": sum(account.num_cancelled for account in accounts),
        "starts_that_paid_for_imports": {service: nursery.num_cold for service, nursery in campaign.nurseries.items()},
        "sha256_of_the_weights": reference.weights,
        "sha256_of_the_training_state": reference.state,
        "seed": seed,
        "duration_s": round(duration_s, 1),
    }


def describe(hits: Mapping[str, Mapping[str, int]]) -> str:
    """For people."""
    return "; ".join(f"{service}: {sum(counter.values())} kills" for service, counter in hits.items())


def main() -> None:
    """Parse, run, record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.splitlines()[0])
    parser.add_argument("fault", choices=["exactly-once"])
    parser.add_argument("--kills", type=int, default=200, help="kill -9 of both services together")
    parser.add_argument("--seed", type=int, default=0, help="seed of the instants")
    parser.add_argument("--keep", type=Path, help="folder for the runs, which then stay")
    parser.add_argument("--out", type=Path, default=RESULTS, help="results file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        record("exactly_once", exactly_once(arguments.kills, arguments.seed, folder.resolve()), arguments.out)
    print(f"recorded in {arguments.out}")


if __name__ == "__main__":
    main()
