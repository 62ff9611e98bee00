"""`ContextParallel`: several ranks share each row, so that one sample may be longer than one device can hold.

    row of T tokens      | rank 0: [0, T/n) | rank 1: [T/n, 2T/n) | ...      contiguous parts, the row padded to n parts
    attention            keys and values are gathered over the ranks; each computes its own queries
    scores               of all trained tokens are gathered, so that every rank has those of the whole row

Losses, masks, metrics and exports then see whole rows and need no code of their own; in exchange every rank of a row
computes the same loss, and each counts 1/n of it. Parameters are sharded over these ranks like over any others, with
plain sums: a rank's gradient is the part that went through its own tokens.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.distributed.device_mesh import init_device_mesh

from trainer.model.logprobs import TokenScores
from trainer.planning.pack import MicroBatch, RowPart
from trainer.ranks import Ranks


@dataclass(frozen=True)
class ContextParallel:
    """This rank among the `size` that share a row. They are neighbours: ranks `size * i` to `size * (i + 1) - 1`."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def part(self, num_tokens: int) -> RowPart:
        """What this rank computes of a row, whose length must be a multiple of `size`."""
        assert num_tokens % self.size == 0, f"a row of {num_tokens} tokens cannot be shared by {self.size} ranks"
        length = num_tokens // self.size
        return RowPart(self.group, self.rank * length, (self.rank + 1) * length)

    def gather(self, values: Tensor) -> Tensor:
        """`values` of all ranks, one after the other, with gradient; all must have the same shape."""
        gathered: Tensor = all_gather_single_autograd(values.contiguous(), 0, self.group)
        return gathered


def join_context(ranks: Ranks, size: int) -> ContextParallel | None:
    """The group of ranks that shares rows with this one; `None` if rows are not shared. Collective."""
    if size == 1:
        return None
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size // size, size), mesh_dim_names=("dp", "cp"))
    return ContextParallel(mesh.get_group("cp"), ranks.rank % size, size)


@dataclass(frozen=True)
class OwnTokens:
    """The trained tokens that this rank predicts, filled up to the same number on every rank."""

    places: Tensor
    """int64[N]: where, in this rank's part of the row, each is predicted."""
    labels: Tensor
    """int64[N]."""
    temperatures: Tensor
    """float32[N]."""
    kept: Tensor
    """int64[L]: places, in the gathered [size * N], of the trained tokens of the whole row, in row order."""


def own_tokens(batch: MicroBatch, context: ContextParallel, part: RowPart) -> OwnTokens:
    """Which trained tokens of `batch`, a whole row, this rank scores. Reads the counts back from the device."""
    tokens = batch.loss_tokens
    predictors = tokens.index - 1
    counts = torch.bincount(predictors // part.num_tokens, minlength=context.size).tolist()
    longest = max(1, *counts)  # at least one, so that gradients of a rank without any still flow, as zeros
    begin = sum(counts[: context.rank])
    mine = slice(begin, begin + counts[context.rank])
    room = (0, longest - counts[context.rank])
    kept = [torch.arange(count) + rank * longest for rank, count in enumerate(counts)]
    return OwnTokens(
        places=torch.nn.functional.pad(predictors[mine] - part.start, room),
        labels=torch.nn.functional.pad(tokens.labels[mine], room),
        temperatures=torch.nn.functional.pad(tokens.temperatures[mine], room, value=1.0),
        kept=torch.cat(kept).to(predictors.device),
    )


def part_of(batch: MicroBatch, part: RowPart) -> MicroBatch:
    """`batch` with this rank's tokens only; its segments remain those of the whole row."""
    own = slice(part.start, part.stop)
    return replace(batch, token_ids=batch.token_ids[own], position_ids=batch.position_ids[own], part=part)


def gathered(scores: TokenScores, context: ContextParallel, kept: Tensor) -> TokenScores:
    """The scores of all trained tokens of the row, from each rank's own. Without the states while gradients are
    computed: training does not need them, and they are large."""
    columns = (scores.logprobs, scores.entropies, None if torch.is_grad_enabled() else scores.states)
    return TokenScores(*(None if column is None else context.gather(column)[kept] for column in columns))  # type: ignore[arg-type]
