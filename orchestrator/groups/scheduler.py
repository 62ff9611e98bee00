"""`Scheduler`: dispatches groups in the order of the examples, as fast as admission allows.

Invariant: at most `max_in_flight` rollouts run, each in a task of the scheduler's own task group; cancelling `run`
cancels them all and leaves no orphan. While no engine is in service nothing is dispatched, and a rollout that an outage
has spoilt is run again: it is not counted as a failure. Under `failure_policy = "drop_group"` the first failure of a
group cancels its other rollouts: they are accounted for at once, and their slots are free when they have ended.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec

from orchestrator.batches.staleness_policy import Outlook, Verdict
from orchestrator.config.envs import EnvConfig
from orchestrator.data.examples import ExampleOrder, Visit
from orchestrator.data.seeds import retry_seed, rollout_seed
from orchestrator.engines.protocol import Availability
from orchestrator.envs.protocol import EnvAdapter, RolloutRequest, accept, call_adapter, lost_tries
from orchestrator.groups.collector import Collector
from orchestrator.values.group import GroupKey, Ticket
from orchestrator.values.rollout import FailureReason, Rollout, RolloutFailure
from runtime.health.health import Health
from transport.changes import Changes

LOOP = "scheduler"
SPOILT = frozenset({FailureReason.ENGINE_ERROR, FailureReason.ENV_TIMEOUT})
"""What becomes of a rollout while no engine is in service."""


@dataclass(frozen=True, slots=True)
class EnvRunner:
    """An environment and how it is to be run."""

    config: EnvConfig
    adapter: EnvAdapter


class Scheduler:
    """`notify` wakes it: a new version is live. A finished rollout wakes it, too."""

    def __init__(
        self,
        envs: Mapping[str, EnvRunner],
        order: ExampleOrder,
        collector: Collector,
        live_version: Callable[[], int],
        seed: int,
        health: Health,
        availability: Availability,
        *,
        max_in_flight: int,
    ) -> None:
        self._envs = envs
        self._order = order
        self._collector = collector
        self._live_version = live_version
        self._seed = seed
        self._health = health
        self._availability = availability
        self._max_in_flight = max_in_flight
        self._changes = Changes()
        self._members: dict[GroupKey, dict[int, asyncio.Task[None]]] = {}
        """Running rollouts by index, of groups that a failure drops."""
        self.in_flight = 0
        self.waited_for_policy_s = 0.0
        """Time spent waiting for a newer policy version, in all."""

    def notify(self) -> None:
        """Something changed: look again whether a group can be admitted."""
        self._changes.notify()

    def set_max_in_flight(self, limit: int) -> None:
        """Rollouts that may run from now on; those that run already are not disturbed."""
        self._max_in_flight = limit
        self.notify()

    async def run(self) -> None:
        """Dispatch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                seq = self._collector.assembler.tail
                env = self._envs[self._order.env_name(seq)]
                await self._choosable(seq)
                await self._admitted(env.config.group_size)
                await self._engines_back()
                self._dispatch(tasks, env, self._order.visit(seq))
                await asyncio.sleep(0)  # a long burst of admissions must not keep finished rollouts waiting

    async def _choosable(self, seq: int) -> None:
        """Only for running groups, which have deadlines: it ends."""
        if not self._order.is_ready(seq):
            what = f"groups of {self._order.env_name(seq)} whose outcomes its curriculum needs"
            with self._health.waiting(what, loop=LOOP):
                await self._changes.wait_for(lambda: self._order.is_ready(seq))

    async def _admitted(self, group_size: int) -> None:
        policy = self._collector.assembler.policy
        while (verdict := policy.verdict(self._outlook(), group_size)) is not Verdict.ADMIT:
            started = time.monotonic()
            with self._waiting(verdict):
                await self._changes.wait()
            if verdict is Verdict.TOO_STALE:
                self.waited_for_policy_s += time.monotonic() - started

    async def _engines_back(self) -> None:
        while not self._availability.is_open:
            engines, reason = self._availability.peers, self._availability.reason
            with self._health.waiting("an engine to come back", peer=engines, detail=reason, loop=LOOP):
                await self._availability.wait()

    def _outlook(self) -> Outlook:
        return self._collector.assembler.outlook(self._live_version(), self._max_in_flight - self.in_flight)

    def _waiting(self, verdict: Verdict) -> AbstractContextManager[None]:
        if verdict is Verdict.TOO_STALE:
            needed = self._collector.assembler.policy.needed_version(self._outlook())
            what = f"policy version {needed} from the trainer"
            live = f"{self._live_version()} is live"
            return self._health.waiting(what, peer="trainer", detail=live, loop=LOOP)
        return self._health.waiting(verdict.value, detail=f"{self.in_flight} rollouts in flight", loop=LOOP)

    def _dispatch(self, tasks: asyncio.TaskGroup, env: EnvRunner, visit: Visit) -> None:
        example = env.adapter.examples[visit.example_index]
        key = GroupKey(visit.env_name, example.example_id, visit.attempt)
        size, jointly = env.config.group_size, env.adapter.scores_jointly
        ticket = Ticket(key, visit.seq, size, jointly, self._live_version())
        self._collector.dispatched(ticket)
        self.in_flight += size
        for index in range(1 if jointly else size):
            request = RolloutRequest(
                example=example,
                group_id=key.id,
                index=index,
                group_size=size,
                seed=rollout_seed(self._seed, *key, index),
                temperature=env.config.sampling.temperature,
                max_tokens=env.config.sampling.max_tokens,
                timeout_s=env.config.rollout_timeout_s,
            )
            task = tasks.create_task(self._run(ticket, env, request))
            task.add_done_callback(lambda _: self._free(size if jointly else 1))
            if env.config.drops_groups:
                self._members.setdefault(key, {})[index] = task

    def _free(self, num_rollouts: int) -> None:
        self.in_flight -= num_rollouts
        self.notify()

    async def _run(self, ticket: Ticket, env: EnvRunner, request: RolloutRequest) -> None:
        """One rollout, or a joint group, through all its tries; it keeps its slots between them."""
        results = await self._try(ticket, env.adapter, request)
        for num_tries in range(1, env.config.num_tries):
            lost = lost_tries(results)
            if not lost:
                break
            for offset, failure in enumerate(lost):
                self._collector.retry(ticket, request.index + offset, failure)
            again = msgspec.structs.replace(request, seed=retry_seed(request.seed, num_tries))
            results = await self._try(ticket, env.adapter, again)
        if env.config.drops_groups and not self._leave(ticket.key, request.index):
            return  # cancelled, accounted for, and came back all the same
        for offset, result in enumerate(results):
            self._collector.record(ticket, request.index + offset, result)
        if env.config.drops_groups and any(isinstance(result, RolloutFailure) for result in results):
            self._cancel_rest(ticket)

    def _leave(self, key: GroupKey, index: int) -> bool:
        """The rollout has come back; false if it was not awaited any more."""
        members = self._members.get(key, {})
        was_awaited = members.pop(index, None) is not None
        if not members:
            self._members.pop(key, None)
        return was_awaited

    def _cancel_rest(self, ticket: Ticket) -> None:
        """A rollout of the group failed: what still runs of it is of no use."""
        cancelled = RolloutFailure(FailureReason.CANCELLED, "another rollout of its group failed")
        for index, task in self._members.pop(ticket.key, {}).items():
            task.cancel()
            self._collector.record(ticket, index, cancelled)

    async def _try(
        self, ticket: Ticket, adapter: EnvAdapter, request: RolloutRequest
    ) -> list[Rollout | RolloutFailure]:
        num_results = ticket.size if ticket.scores_jointly else 1
        results = accept(await self._call(adapter, request), num_results, ticket.version)
        self._health.progress()
        return results

    async def _call(self, adapter: EnvAdapter, request: RolloutRequest) -> Sequence[Rollout | RolloutFailure]:
        while True:
            num_outages = self._availability.num_outages
            results = await call_adapter(adapter, request)
            spoilt = any(isinstance(result, RolloutFailure) and result.reason in SPOILT for result in results)
            if not spoilt or (num_outages == self._availability.num_outages and self._availability.is_open):
                return results
            await self._availability.wait()
