"""The tiled head beside the plain one: time and peak memory of log probabilities, entropies and their gradients.

    python -m benchmarks.lm_head

Each measurement is a process of its own. Time is CPU time of one thread, best of several repeats, both heads in one
process, in turns. Extra memory is the rise of the process's peak resident size (`ru_maxrss`) over its value when
weights, hidden states and their gradients are all allocated: what a head needs besides, to the page. The plain head
computes what the trainer needs in the fewest operations we know: log_softmax with gradient, entropy without.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import harness
from trainer.model.logprobs import TokenScores, token_scores

TIMED = (2048, 65536, 256)
"""Tokens, vocabulary, hidden size."""
SIZES = ((512, 65536, 256), (2048, 65536, 256), (4096, 65536, 256))
REPEATS = 3
Head = Callable[[Tensor, Tensor, Tensor, Tensor], TokenScores]


def plain(hidden: Tensor, head: Tensor, labels: Tensor, temperatures: Tensor) -> TokenScores:
    """All logits at once."""
    distribution = (hidden @ head.T).div(temperatures[:, None]).log_softmax(-1)
    with torch.no_grad():
        entropies = -torch.linalg.vecdot(distribution.exp(), distribution)
    return TokenScores(distribution.gather(-1, labels[:, None])[:, 0], entropies)


HEADS: dict[str, Head] = {"plain": plain, "tiled": token_scores}


def make_inputs(num_tokens: int, vocabulary: int, hidden_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, labels, temperatures; gradients are allocated."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).requires_grad_()
    head = (torch.randn(vocabulary, hidden_size, generator=generator) * 0.05).requires_grad_()
    hidden.grad, head.grad = torch.ones_like(hidden), torch.ones_like(head)
    labels = torch.randint(vocabulary, (num_tokens,), generator=generator)
    return hidden, head, labels, torch.ones(num_tokens)


def run(head: Head, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> float:
    """CPU seconds of forward and backward."""
    started = time.process_time()
    head(*inputs).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    return time.process_time() - started


def measure_times() -> dict[str, float]:
    """Best CPU seconds of each head, taken in turns, so that a busy machine is busy for both."""
    inputs = make_inputs(*TIMED)
    times: dict[str, list[float]] = {name: [] for name in HEADS}
    for _ in range(REPEATS):
        for name, head in HEADS.items():
            times[name].append(run(head, inputs))
    return {name: min(taken) for name, taken in times.items()}


def measure_memory(name: str, num_tokens: int, vocabulary: int, hidden_size: int) -> dict[str, float]:
    """MiB that a head needs besides its inputs and their gradients."""
    run(HEADS[name], make_inputs(64, 64, 64))  # libraries that are loaded at the first call
    inputs = make_inputs(num_tokens, vocabulary, hidden_size)
    before = peak_mib()
    run(HEADS[name], inputs)
    return {"extra_mib": peak_mib() - before}


def peak_mib() -> float:
    """Peak resident size of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_process(*arguments: str) -> dict[str, float]:
    """What this module prints when it is called with `arguments`."""
    command = [sys.executable, "-m", "benchmarks.lm_head", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def measure() -> dict[str, object]:
    """All figures."""
    seconds = in_process("times")
    memory = {}
    for num_tokens, vocabulary, hidden_size in SIZES:
        size = f"T={num_tokens} V={vocabulary} H={hidden_size}"
        memory[size] = {name: round(in_process(name, str(num_tokens))["extra_mib"], 1) for name in HEADS}
    return {
        "results": {
            "seconds": {name: round(value, 2) for name, value in seconds.items()},
            "time_tiled_over_plain": round(seconds["tiled"] / seconds["plain"], 3),
            "extra_mib": memory,
        }
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case ["times"]:
            print(json.dumps(measure_times()))
        case ["plain" | "tiled" as head, tokens]:
            print(json.dumps(measure_memory(head, int(tokens), *TIMED[1:])))
        case _:
            harness.main("lm_head", __doc__, measure)
