"""Real ranks: processes with a gloo group that write down what they saw; gradients, and how far they are apart."""

import json
import multiprocessing
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Rank:
    """What a rank knows when it starts. `out` is a folder that all ranks share."""

    rank: int
    world_size: int
    model_path: Path
    out: Path

    def live(self, work: Callable[["Rank"], object]) -> None:
        """Join the others, work, and leave `rank<k>.json` with what `work` returned, or `error<k>.txt`."""
        torch.set_num_threads(1)
        for category in (FutureWarning, UserWarning):  # pytest's own filters do not reach this process
            warnings.simplefilter("error", category)
        store = dist.FileStore(str(self.out / "rendezvous"), self.world_size)
        timeout = timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)
        try:
            (self.out / f"rank{self.rank}.json").write_text(json.dumps(work(self)))
        except Exception:
            (self.out / f"error{self.rank}.txt").write_text(traceback.format_exc())
            raise
        finally:
            dist.destroy_process_group()


@dataclass(frozen=True)
class RankRun:
    """What the ranks of one group wrote down."""

    world_size: int
    out: Path

    def results(self, rank: int = 0) -> dict[str, Any]:
        """What `work` returned."""
        results: dict[str, Any] = json.loads((self.out / f"rank{rank}.json").read_text())
        return results

    def gradients(self, name: str) -> dict[str, Tensor]:
        """What a rank saved under this name."""
        return load_file(self.out / f"{name}.safetensors")


def run_ranks(
    world_size: int, model_path: Path, out: Path, work: Callable[[Rank], object], within_s: float = 120
) -> RankRun:
    """Let so many processes do `work`. Fails if one of them does, or is not done in time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])  # torch is imported once, not once per rank
    ranks = [Rank(rank, world_size, model_path, out) for rank in range(world_size)]
    processes = [context.Process(target=rank.live, args=(work,)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=within_s)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
        process.join()
    errors = [path.read_text() for path in sorted(out.glob("error*.txt"))]
    assert not alive, f"ranks hang {errors}"
    assert all(process.exitcode == 0 for process in processes), "\n".join(errors)
    return RankRun(world_size, out)


class GradientRecorder(torch.optim.Optimizer):
    """An optimizer that keeps the gradients it is given and changes nothing.

    Every trained parameter must have a gradient, unless the recorder is to `allow_unused` ones.
    """

    def __init__(self, module: nn.Module, *, allow_unused: bool = False) -> None:
        super().__init__(module.parameters(), {"lr": 0.0})
        self._module = module
        self._allow_unused = allow_unused
        self.gradients: dict[str, Tensor] = {}

    def step(self) -> None:  # type: ignore[override]
        self.gradients = {
            name: full(parameter.grad)
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad and not (self._allow_unused and parameter.grad is None)
        }


def full(tensor: Tensor | None) -> Tensor:
    """A copy of all of it, whoever holds the parts."""
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def relative_error(gradients: dict[str, Tensor], expected: dict[str, Tensor], prefix: str = "") -> float:
    """Size of the difference, as a share of the size of `expected`, over all names with `prefix`."""
    assert gradients.keys() == expected.keys()
    names = [name for name in expected if name.startswith(prefix)]
    difference = torch.stack([(gradients[name].double() - expected[name]).square().sum() for name in names]).sum()
    size = torch.stack([expected[name].square().sum() for name in names]).sum()
    assert size > 0
    return float((difference / size).sqrt())
