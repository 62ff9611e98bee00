"""Real ranks: processes with a gloo group that train every scenario and write down what they saw."""

from dataclasses import replace

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support.ranks import GradientRecorder, Rank, full
from tests.trainer.critic.critic_cases import CRITIC_CASES, CriticCase, train_critic_case
from tests.trainer.scenarios import ENV_NAMES, LOSSES, SCENARIOS, SEQ_LEN, Scenario, make_manifest, ordered
from trainer.checks.canary import make_canary
from trainer.checks.packing import verify_packing
from trainer.config.loss import DppoLossConfig
from trainer.config.model import ModelConfig
from trainer.config.trainer import TokenExportConfig
from trainer.images.samples import check_image_samples
from trainer.losses.factory import make_loss
from trainer.model.fsdp import shard_policy
from trainer.model.policy import Policy, load_policy
from trainer.observe.token_export import TokenExport
from trainer.planning.pack import MicroBatch, pack_mini_batch
from trainer.planning.plan import plan_step
from trainer.ranks import Ranks
from trainer.step.report import StepReport
from trainer.step.step import StepSettings, train_mini_batch

CPU = torch.device("cpu")
NO_CLIP = 1e9


def micro_batches_of(scenario: Scenario, rank: int, world_size: int, mini_batch: int = 0) -> list[MicroBatch]:
    samples = ordered(scenario)
    plan = plan_step(make_manifest(samples), scenario.layout(rank, world_size))
    mine = check_image_samples({row: samples[row] for row in plan.rows_for(rank).tolist()}, None, SEQ_LEN).samples
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


def train_all(me: Rank) -> dict[str, object]:
    """Train every scenario; rank 0 leaves gradients by scenario."""
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
    return results


def part_name(name: str, mini_batch: int) -> str:
    return f"{name} {mini_batch}" if mini_batch else name


def _record(policy: Policy, scenario: Scenario, name: str, me: Rank, mini_batch: int = 0) -> dict[str, object]:
    recorder = GradientRecorder(policy.causal_lm)
    report = train_scenario(policy, recorder, scenario, me.rank, me.world_size, mini_batch)
    if me.rank == 0:
        save_file(recorder.gradients, me.out / f"{name}.safetensors")
    return {"loss": report.metrics["loss"], "metrics": report.metrics}


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
        results[key] = {"loss": report.metrics["loss"], "metrics": report.metrics}
    return results


def _export_tokens(policy: Policy, me: Rank) -> None:
    samples = ordered(SCENARIOS["packed"])
    plan = plan_step(make_manifest(samples), SCENARIOS["packed"].layout(me.rank, me.world_size))
    mine = check_image_samples({row: samples[row] for row in plan.rows_for(me.rank).tolist()}, None, SEQ_LEN).samples
    ranks = Ranks(me.rank, me.world_size, CPU)
    export = TokenExport(TokenExportConfig(max_sequences_per_step=9), me.out / "token_export", ranks, seed=0)
    recorder = export.recorder(plan, mine)
    settings, loss = StepSettings(ENV_NAMES, NO_CLIP, SEQ_LEN), make_loss(DppoLossConfig())
    train_mini_batch(
        policy, GradientRecorder(policy.causal_lm), pack_mini_batch(plan, 0, me.rank, mine), loss, settings, recorder
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
