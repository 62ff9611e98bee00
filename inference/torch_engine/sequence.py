"""`Sequence`: a job inside the engine, with its identity and the policy versions that sampled for it."""

from dataclasses import dataclass, field

from inference.generation import Completion, Job, TopLogprobs
from transport.wire.sample import VersionSpan


@dataclass(slots=True, eq=False)
class Sequence:
    """One job. `key` is unique in the engine; `seed` is the job's own or one the engine chose."""

    key: int
    job: Job
    seed: int
    stop_ids: frozenset[int]
    limit: int
    """Prompt plus completion may not be longer than this."""
    switches: list[tuple[int, int]] = field(default_factory=list)
    """`(version, number of tokens sampled before it took over)`, in order."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)

    def spans(self, num_sampled: int) -> tuple[VersionSpan, ...]:
        """Which version sampled which tokens; versions that sampled none are left out."""
        ends = [start for _, start in self.switches[1:]] + [num_sampled]
        spans = (VersionSpan(version, start, end) for (version, start), end in zip(self.switches, ends, strict=True))
        return tuple(span for span in spans if span.end > span.start)


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a sequence: a completion, or why there is none."""

    key: int
    result: Completion | Exception
