"""`WithholdLineup`: batches of what is finished, withheld where a group would become too old. The policy `withhold`.

Batch `N` takes finished groups in dispatch order and steps over those that still run. It is cut as soon as it is full,
but only if everything that would be left can still ship in time. A group that was dispatched under version `v` has a
**last batch**, `v + 1 + max_staleness`; the groups left, running ones counted as whole, must all meet

    (N + 1) + min(rollouts ahead // batch_size, groups ahead // groups_per_batch) <= last batch

where those ahead are the groups left that were dispatched before. Otherwise the batch is withheld until more groups
have finished. Admission is that of `wait` (`admission.py`).

Why nothing goes stale: admission makes the condition true from batch `N` on for each group it lets in; a group that
finishes only lowers the sums; and a cut is made only if the condition stays true from `N + 1` on. It implies that no
group's last batch has passed.
Why it never locks up: once nothing runs, nothing is stepped over. A full batch then takes at least `batch_size`
rollouts and `groups_per_batch` groups from those ahead of every group left, which makes up for the step from `N` to
`N + 1`. If there is no full batch, admission lets more groups in, as under `wait`.
"""

from bisect import insort
from collections.abc import Iterable

from orchestrator.filters import ScoredGroup
from orchestrator.lineup import Finish, Lineup
from orchestrator.positions import Done

Load = tuple[int, int]
"""Last batch of a group, and the most rollouts that it can bring."""


def fits(queue: Iterable[Load], first_step: int, batch_size: int, groups_per_batch: int) -> bool:
    """Whether all groups, taken in this order into batches from `first_step` on, ship in time whatever they bring."""
    num_rollouts = 0
    for num_groups, (last_step, size) in enumerate(queue):
        if first_step + min(num_rollouts // batch_size, num_groups // groups_per_batch) > last_step:
            return False
        num_rollouts += size
    return True


class WithholdLineup(Lineup):
    """Filtered groups are passed at once and are in the next cut."""

    def __init__(
        self,
        batch_size: int,
        next_step: int,
        done: Done,
        finish: Finish = tuple,
        *,
        max_staleness: int,
        groups_per_batch: int,
    ) -> None:
        super().__init__(batch_size, next_step, done, finish)
        self._max_staleness = max_staleness
        self._groups_per_batch = groups_per_batch
        self._ready: list[ScoredGroup] = []

    def __len__(self) -> int:
        return super().__len__() + len(self._ready)

    def _take(self, scored: ScoredGroup) -> list[ScoredGroup]:
        if scored.num_trainable:
            insort(self._ready, scored, key=lambda group: group.group.ticket.seq)
        else:
            self._form(scored)
        while self._cut_ready():
            pass
        return [scored]

    def _cut_ready(self) -> bool:
        """Cut a batch of the finished groups; false if it is not full, or withheld."""
        number = num_rollouts = 0
        while num_rollouts < self._batch_size:
            if number == len(self._ready):
                return False
            num_rollouts += self._ready[number].num_trainable
            number += 1
        chosen, left = self._ready[:number], self._ready[number:]
        if not self._is_in_time(left):
            return False
        self._ready = left
        for scored in chosen:
            self._form(scored)
        return True

    def _is_in_time(self, left: list[ScoredGroup]) -> bool:
        """Whether these, and all that run, can still ship if the next batch is cut without them."""
        queue = [(ticket.seq, ticket.version, ticket.size) for ticket in self._open.values()]
        queue += [(group.group.ticket.seq, group.group.ticket.version, group.num_trainable) for group in left]
        loads = ((version + 1 + self._max_staleness, size) for _, version, size in sorted(queue))
        return fits(loads, self.next_step + 1, self._batch_size, self._groups_per_batch)
