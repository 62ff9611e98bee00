"""Ways of training with a critic that must not change its gradient, and the gradient by plain float64 code."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from tests.support.ranks import GradientRecorder
from tests.trainer.reference import load_reference, reference_loss, unit_name
from tests.trainer.scenarios import ENV_NAMES, MIXED_LENGTHS, SEQ_LEN, make_manifest, make_sample
from trainer.config.loss import DppoLossConfig
from trainer.config.model import CriticConfig, ModelConfig
from trainer.critic.critic import CriticLearner, load_critic, shard_critic
from trainer.critic.step import CriticStep
from trainer.critic.values import estimate_values
from trainer.images.samples import check_image_samples
from trainer.losses.factory import make_loss
from trainer.model.policy import Policy
from trainer.planning.layout import Layout, Weighting
from trainer.planning.pack import pack_mini_batch
from trainer.planning.plan import plan_step
from trainer.step.report import StepReport
from trainer.step.step import StepSettings, train_mini_batch
from transport.wire.sample import EncodedTensor, TrainingSample

CPU = torch.device("cpu")
NO_CLIP = 1e9
MOVE = 1.4
"""What the value head is multiplied with between values and training, so that the clipping of values shows."""
TRAJECTORIES = [0, 1, 0, 2, 2, 3, 0, 4, 2, 3, 1, 4]


@dataclass(frozen=True)
class CriticCase:
    config: CriticConfig
    cap: int = SEQ_LEN
    pad_multiple: int = 1
    weighting: Weighting = Weighting.TOKEN
    mini_batches: int = 1

    def layout(self, rank: int, world_size: int) -> Layout:
        return Layout(rank, world_size, self.cap, SEQ_LEN, self.mini_batches, weighting=self.weighting)


def _config(trunk: str, level: str, **changes: object) -> CriticConfig:
    return CriticConfig(trunk=trunk, level=level, gamma=0.97, lam=0.9, clip=0.05, **changes)  # type: ignore[arg-type]


CRITIC_CASES = {
    "own, packed": CriticCase(_config("own", "token")),
    "own, one sample per row": CriticCase(_config("own", "token"), cap=2),
    "own, steps in mini-batches": CriticCase(_config("own", "step"), cap=32, mini_batches=2),
    "shared, mini-batches": CriticCase(_config("shared", "token"), cap=32, mini_batches=2),
    "shared, steps by trajectory": CriticCase(
        _config("shared", "step", normalize_advantages=False), pad_multiple=16, weighting=Weighting.TRAJECTORY
    ),
}


def critic_samples() -> list[TrainingSample]:
    """Twelve samples of five trajectories that do not stand together, as `advantage.type = "ppo"` sends them; some have
    two turns, and one has tokens that are not `rl`."""
    rng = np.random.default_rng(4)
    rewards = rng.random(5).tolist()
    samples = []
    for row, (length, trajectory) in enumerate(zip(MIXED_LENGTHS, TRAJECTORIES, strict=True)):
        mask = np.arange(length) >= max(1, length // 2)
        if length > 20:
            mask[length // 2 + 4 : length // 2 + 7] = False
        changes: dict[str, object] = {"loss_mask": EncodedTensor.of(mask)}
        if row == 3:
            weights = np.where(np.arange(length) < 30, 1.0, 0.0).astype(np.float32)
            changes |= {"rl_weights": EncodedTensor.of(weights), "ce_weights": EncodedTensor.of(1 - weights)}
        samples.append(
            make_sample(
                row,
                length,
                rng,
                trajectory_id=f"t{trajectory}",
                group_id=f"g{trajectory // 3}",
                step_index=TRAJECTORIES[:row].count(trajectory),
                reward=rewards[trajectory],
                advantages=rewards[trajectory],
                **changes,
            )
        )
    return samples


def head_weights(hidden_size: int) -> tuple[Tensor, float]:
    """(weight, bias) of the value head in all tests."""
    return torch.sin(torch.arange(hidden_size, dtype=torch.float64)) * 0.1, 0.3


def train_critic_case(
    policy: Policy, model_path: Path, case: CriticCase, rank: int, world_size: int, mesh: DeviceMesh | None
) -> list[tuple[StepReport, dict[str, Tensor]]]:
    """(report, gradients) of each mini-batch, from values before, and a value head moved after, they were estimated."""
    critic = load_critic(case.config, ModelConfig(path=model_path, seq_len=SEQ_LEN), policy, CPU)
    weight, bias = head_weights(policy.causal_lm.config.hidden_size)
    with torch.no_grad():
        critic.value_head.weight.copy_(weight[None])
        critic.value_head.bias.fill_(bias)
    shard_critic(critic, mesh, reshard_after_forward=True)
    recorders = GradientRecorder(policy), GradientRecorder(critic)
    learner = CriticLearner(critic, recorders[1], case.config, NO_CLIP)
    samples = critic_samples()
    manifest = make_manifest(samples)
    plan = plan_step(manifest, case.layout(rank, world_size))
    mine = check_image_samples({row: samples[row] for row in plan.rows_for(rank).tolist()}, None, SEQ_LEN).samples
    all_batches = [batch for index in range(case.mini_batches) for batch in pack_mini_batch(plan, index, rank, mine)]
    values = estimate_values(learner, policy, manifest, all_batches, mine)
    mine = values.with_advantages(mine)
    with torch.no_grad():
        for parameter in critic.value_head.parameters():
            parameter.mul_(MOVE)
    settings, loss = StepSettings(ENV_NAMES, NO_CLIP, case.cap, plan.num_units), make_loss(DppoLossConfig())
    results = []
    for index in range(case.mini_batches):
        batches = pack_mini_batch(plan, index, rank, mine, case.pad_multiple)
        step = CriticStep(learner, values, batches, ENV_NAMES, plan.num_units)
        report = train_mini_batch(policy, recorders[0], batches, loss, settings, critic=step)
        gradients = {f"policy.{name}": gradient for name, gradient in recorders[0].gradients.items()}
        gradients |= {f"critic.{name}": gradient for name, gradient in recorders[1].gradients.items()}
        results.append((report, gradients))
    return results


class PlainCritic:
    """The same by loops over samples and tokens, in float64."""

    def __init__(self, model_path: Path, case: CriticCase) -> None:
        self._case = case
        self.policy = load_reference(model_path)
        self.trunk = load_reference(model_path) if case.config.trunk == "own" else self.policy
        weight, bias = head_weights(self.policy.config.hidden_size)
        self.weight = weight.clone().requires_grad_()
        self.bias = torch.tensor(bias, dtype=torch.float64).requires_grad_()
        self.samples = critic_samples()
        with torch.no_grad():
            self.old_values = [self._values(sample) for sample in self.samples]
        self.advantages, self.returns = self._credit()
        with torch.no_grad():
            self.weight.mul_(MOVE)
            self.bias.mul_(MOVE)

    def gradients(self, mini_batch: int) -> tuple[float, float, dict[str, Tensor]]:
        """(policy loss, value loss, gradients by name)."""
        for module in (self.policy, self.trunk):
            module.zero_grad()
        self.weight.grad = self.bias.grad = None
        plan = plan_step(make_manifest(self.samples), self._case.layout(0, 1))
        rows = sorted(plan.mini_batches[mini_batch].rows.tolist())
        policy_loss = reference_loss(
            self.policy, [self._with_advantages(row) for row in rows], SEQ_LEN, "dppo", self._case.weighting
        )
        value_loss = self._value_loss(rows)
        (policy_loss + self._case.config.loss_weight * value_loss).backward()
        found = {f"policy.causal_lm.{name}": parameter.grad for name, parameter in self.policy.named_parameters()}
        if self._case.config.trunk == "own":
            trunk: PreTrainedModel = self.trunk.base_model
            found |= {f"critic.trunk.{name}": parameter.grad for name, parameter in trunk.named_parameters()}
        assert self.weight.grad is not None
        assert self.bias.grad is not None
        found |= {"critic.value_head.weight": self.weight.grad[None], "critic.value_head.bias": self.bias.grad[None]}
        return float(policy_loss.detach()), float(value_loss.detach()), found

    def _values(self, sample: TrainingSample) -> Tensor:
        """Of the states before tokens 1, 2, ..."""
        token_ids = torch.from_numpy(sample.token_ids.numpy()[:SEQ_LEN].astype(np.int64))
        hidden = self.trunk.base_model(token_ids[None], use_cache=False).last_hidden_state[0, :-1]
        return hidden @ self.weight + self.bias

    def _actions(self, row: int) -> list[list[int]]:
        """Places in `_values` of the actions of a sample: the tokens of each turn."""
        sample = self.samples[row]
        weights = np.ones(sample.num_tokens) if sample.rl_weights is None else sample.rl_weights.numpy()
        turns: list[list[int]] = []
        for token in range(1, min(sample.num_tokens, SEQ_LEN)):
            if sample.loss_mask.numpy()[token] and weights[token] != 0:
                if turns and turns[-1][-1] == token - 2:
                    turns[-1].append(token - 1)
                else:
                    turns.append([token - 1])
        return turns

    def _credit(self) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
        """(advantages of all actions, returns of those that a value is trained for), by (row, place)."""
        config = self._case.config
        advantages: dict[tuple[int, int], float] = {}
        returns: dict[tuple[int, int], float] = {}
        for trajectory in sorted(set(TRAJECTORIES)):
            rows = [row for row, owner in enumerate(TRAJECTORIES) if owner == trajectory]
            turns = [(row, turn) for row in rows for turn in self._actions(row)]
            if config.level == "token":
                turns = [(row, [place]) for row, turn in turns for place in turn]
            next_value, carried, reward = 0.0, 0.0, self.samples[rows[0]].reward
            for row, turn in reversed(turns):
                value = float(self.old_values[row][turn[0]])
                carried = reward + config.gamma * next_value - value + config.gamma * config.lam * carried
                next_value, reward = value, 0.0
                returns[row, turn[0]] = carried + value
                advantages |= {(row, place): carried for place in turn}
        if config.normalize_advantages:
            all_values = np.array(list(advantages.values()))
            advantages = {key: (value - all_values.mean()) / all_values.std() for key, value in advantages.items()}
        return advantages, returns

    def _with_advantages(self, row: int) -> TrainingSample:
        column = np.zeros(self.samples[row].num_tokens, dtype=np.float32)
        for (owner, place), value in self.advantages.items():
            if owner == row:
                column[place + 1] = value
        return msgspec.structs.replace(self.samples[row], advantages=EncodedTensor.of(column))

    def _value_loss(self, rows: list[int]) -> Tensor:
        units: dict[str, list[Tensor]] = {}
        clip = self._case.config.clip
        assert clip is not None
        for row in rows:
            values, old = self._values(self.samples[row]), self.old_values[row]
            for (owner, place), target in self.returns.items():
                if owner == row:
                    held = old[place] + (values[place] - old[place]).clamp(-clip, clip)
                    loss = torch.maximum((values[place] - target) ** 2, (held - target) ** 2) / 2
                    units.setdefault(unit_name(self._case.weighting, self.samples[row], row), []).append(loss)
        return torch.stack([torch.stack(unit).mean() for unit in units.values()]).mean()
