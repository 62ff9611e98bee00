"""Real ranks: processes with a gloo group that train every scenario and write down what they saw."""

import json
import traceback
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.trainer.core.critic_cases import CRITIC_CASES, CriticCase, train_critic_case
from tests.trainer.core.scenarios import LOSSES, SCENARIOS, SEQ_LEN, Scenario, ordered
from tests.trainer.core.tiny import ENV_NAMES, make_manifest
from trainer.canary import make_canary
from trainer.config import ModelConfig, TokenExportConfig
from trainer.distributed import Ranks
from trainer.fsdp import shard_policy
from trainer.losses.config import DppoLossConfig
from trainer.losses.factory import make_loss
from trainer.micro_batch import MicroBatch
from trainer.model import Policy, load_policy
from trainer.oracle import verify_packing
from trainer.packing import pack_mini_batch
from trainer.plan import plan_step
from trainer.step import StepReport, StepSettings, train_mini_batch
from trainer.token_export import TokenExport

CPU = torch.device("cpu")
NO_CLIP = 1e9


class GradientRecorder(torch.optim.Optimizer):
    """An optimizer that keeps the gradient it is given and changes nothing."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.parameters(), {})
        self._policy = policy
        self.gradients: dict[str, Tensor] = {}

    def step(self) -> None:  # type: ignore[override]
        self.gradients = {
            name: full(parameter.grad)
            for name, parameter in self._policy.causal_lm.named_parameters()
            if parameter.requires_grad
        }


def full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@dataclass(frozen=True)
class Rank:
    rank: int
    world_size: int
    model_path: Path
    out: Path


def micro_batches_of(scenario: Scenario, rank: int, world_size: int, mini_batch: int = 0) -> list[MicroBatch]:
    samples = ordered(scenario)
    plan = plan_step(make_manifest(samples), scenario.layout(rank, world_size))
    mine = {row: samples[row] for row in plan.rows_for(rank).tolist()}
    return pack_mini_batch(plan, mini_batch, rank, mine, scenario.pad_multiple)


def train_scenario(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    scenario: Scenario,
    rank: int,
    world_size: int,
    mini_batch: int = 0,
) -> StepReport:
    num_units = plan_step(make_manifest(ordered(scenario)), scenario.layout(rank, world_size)).num_units
    micro_batches = micro_batches_of(scenario, rank, world_size, mini_batch)
    settings = StepSettings(ENV_NAMES, NO_CLIP, scenario.cap, num_units)
    return train_mini_batch(policy, optimizer, micro_batches, make_loss(LOSSES[scenario.loss]), settings)


def run_rank(me: Rank) -> None:
    """Entry point of a rank. Leaves `rank<k>.json`, `error<k>.txt` on failure, and (rank 0) gradients by scenario."""
    torch.set_num_threads(1)
    for category in (FutureWarning, UserWarning):  # pytest's own filters do not reach this process
        warnings.simplefilter("error", category)
    store = dist.FileStore(str(me.out / "rendezvous"), me.world_size)
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world_size, timeout=timedelta(seconds=60))
    try:
        _work(me)
    except Exception:
        (me.out / f"error{me.rank}.txt").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def _work(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (me.world_size,), mesh_dim_names=("dp",))
    config = ModelConfig(path=me.model_path, seq_len=SEQ_LEN)
    policy = shard_policy(load_policy(config, CPU), mesh, reshard_after_forward=True)
    verify_packing(policy, CPU)
    results: dict[str, object] = {"canary": {"logprobs": make_canary(policy).logprobs.numpy().tolist()}}
    for name, scenario in SCENARIOS.items():
        for mini_batch in range(scenario.mini_batches):
            key = part_name(name, mini_batch)
            results[key] = _record(policy, scenario, key, me, mini_batch)
    half = load_policy(config.model_copy(update={"dtype": "bfloat16"}), CPU)
    head = half.causal_lm.get_output_embeddings().weight.detach().bfloat16()
    shard_policy(half, mesh, reshard_after_forward=False)
    results["bfloat16"] = _record(half, SCENARIOS["packed"], "bfloat16", me)
    results["bfloat16 head"] = _head_error(half, head, me)
    lean = load_policy(config.model_copy(update={"activation_checkpointing": True}), CPU)
    results["checkpointed"] = _record(
        shard_policy(lean, mesh, reshard_after_forward=True), SCENARIOS["packed"], "checkpointed", me
    )
    for name, case in CRITIC_CASES.items():
        results |= _record_critic(policy, name, case, me, mesh)
    _export_tokens(policy, me)
    results["poisoned"] = _poisoned_step(policy, me)
    (me.out / f"rank{me.rank}.json").write_text(json.dumps(results))


def part_name(name: str, mini_batch: int) -> str:
    return f"{name} {mini_batch}" if mini_batch else name


def _record(policy: Policy, scenario: Scenario, name: str, me: Rank, mini_batch: int = 0) -> dict[str, object]:
    recorder = GradientRecorder(policy)
    report = train_scenario(policy, recorder, scenario, me.rank, me.world_size, mini_batch)
    if me.rank == 0:
        save_file(recorder.gradients, me.out / f"{name}.safetensors")
    return {"loss": report.loss, "metrics": report.metrics}


def _head_error(policy: Policy, head: Tensor, me: Rank) -> float:
    """Largest difference of a log probability from the one that the states of `policy` have in double precision."""
    batch = micro_batches_of(SCENARIOS["packed"], me.rank, me.world_size)[0]
    with torch.no_grad():
        scores = policy(batch)
    tokens = batch.loss_tokens
    assert scores.states is not None
    assert scores.states.dtype == head.dtype
    logits = scores.states.double() @ head.double().T / tokens.temperatures.double()[:, None]
    exact = logits.log_softmax(-1).gather(-1, tokens.labels[:, None])[:, 0]
    return float((scores.logprobs - exact).abs().max())


def _record_critic(policy: Policy, name: str, case: CriticCase, me: Rank, mesh: DeviceMesh) -> dict[str, object]:
    results: dict[str, object] = {}
    trained = train_critic_case(policy, me.model_path, case, me.rank, me.world_size, mesh)
    for mini_batch, (report, gradients) in enumerate(trained):
        key = f"critic, {part_name(name, mini_batch)}"
        if me.rank == 0:
            save_file(gradients, me.out / f"{key}.safetensors")
        results[key] = {"loss": report.loss, "metrics": report.metrics}
    return results


def _export_tokens(policy: Policy, me: Rank) -> None:
    samples = ordered(SCENARIOS["packed"])
    plan = plan_step(make_manifest(samples), SCENARIOS["packed"].layout(me.rank, me.world_size))
    mine = {row: samples[row] for row in plan.rows_for(me.rank).tolist()}
    ranks = Ranks(me.rank, me.world_size, CPU)
    export = TokenExport(TokenExportConfig(max_sequences_per_step=9), me.out / "token_export", ranks, seed=0)
    recorder = export.recorder(plan, mine)
    settings, loss = StepSettings(ENV_NAMES, NO_CLIP, SEQ_LEN), make_loss(DppoLossConfig())
    train_mini_batch(
        policy, GradientRecorder(policy), pack_mini_batch(plan, 0, me.rank, mine), loss, settings, recorder
    )
    export.write(recorder)


def _poisoned_step(policy: Policy, me: Rank) -> dict[str, object]:
    """A NaN in one number of the last rank, then the same batch without it."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
    before = _weights(policy)
    batches = micro_batches_of(SCENARIOS["packed"], me.rank, me.world_size)
    clean = batches[0]
    if me.rank == me.world_size - 1:
        batches[0] = _with_nan(clean)
    loss, settings = make_loss(DppoLossConfig()), StepSettings(ENV_NAMES, NO_CLIP, SEQ_LEN)
    poisoned = train_mini_batch(policy, optimizer, batches, loss, settings)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, _weights(policy), strict=True))
    batches[0] = clean
    healthy = train_mini_batch(policy, optimizer, batches, loss, settings)
    changed = not all(torch.equal(a, b) for a, b in zip(before, _weights(policy), strict=True))
    return {
        "stepped": poisoned.stepped,
        "unchanged": unchanged,
        "stepped_after": healthy.stepped,
        "changed_after": changed,
    }


def _with_nan(batch: MicroBatch) -> MicroBatch:
    logprobs = batch.loss_tokens.logprobs.clone()
    logprobs[0] = float("nan")
    return replace(batch, loss_tokens=replace(batch.loss_tokens, logprobs=logprobs))


def _weights(policy: Policy) -> list[Tensor]:
    return [full(parameter) for parameter in policy.parameters()]
