"""Configuration of the `trainer` service."""

from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from runtime.base.files import sees_images
from runtime.config.config import Config, HealthConfig, ServiceConfig
from runtime.config.keys import Advanced
from trainer.config.loss import DppoLossConfig, LossConfig
from trainer.config.model import CriticConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from transport.security.exposure import check_exposure, netloc


class CheckpointConfig(Config):
    """Checkpoints: what a trainer resumes from after a crash."""

    interval_steps: int = Field(10, gt=0)
    """Steps between checkpoints. The orchestrator keeps every batch since the last one."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that stay on disk."""
    background: Advanced[bool] = False
    """Write checkpoints in a thread while training continues. Needs host memory for a copy of the state. A step is
    committed once its checkpoint is durable."""


class WeightsConfig(Config):
    """How the weights of every step, a policy version, get to the engines."""

    channel: Literal["filesystem", "zmq", "collective"] = "filesystem"
    """How engines get them. `filesystem`: files in the run directory. `zmq`: every rank serves its part from memory.
    `collective` (experimental): as `zmq`, broadcast by torch process groups, not encrypted."""
    keep: Advanced[int] = Field(3, ge=2)
    """Newest publishes that stay: on disk, or in memory with `zmq` and `collective`."""
    host: str = "127.0.0.1"
    """Address that each rank binds for `zmq` and `collective`. One that other machines reach needs `keys_dir`."""
    port: int = Field(0, ge=0, le=65535)
    """TCP port of the first rank for `zmq` and `collective`; rank r binds port + r. 0: each rank takes a free one."""
    advertised_host: Advanced[str | None] = None
    """Name or address under which engines reach this machine; by default `host`, or the machine's own name if that is
    a wildcard."""
    keys_dir: Path | None = None
    """`zmq`: folder of CURVE keys (`rl keys DIR` makes one): `server.*` for the ranks, `client*.public` of every
    engine."""
    insecure: Advanced[bool] = False
    """Bind an address that other machines reach without keys (logged every minute), or with `collective` at all."""
    broadcast_timeout_s: Advanced[float] = Field(60.0, gt=0)
    """`collective` (experimental): seconds that rank and engine wait for each other, to join a group and to pass on a
    chunk."""

    @model_validator(mode="after")
    def _check_exposure(self) -> "WeightsConfig":
        if self.channel == "filesystem":
            return self
        advice = ": set weights.keys_dir, or weights.insecure = true"
        if self.channel == "collective":
            advice = (
                ", and process groups are not protected: set weights.insecure = true in a private network, "
                "or weights.channel = 'zmq' with keys"
            )
        check_exposure(
            f"tcp://{netloc(self.host, self.port)}",
            name=f"weights.host {self.host}",
            is_protected=self.channel == "zmq" and self.keys_dir is not None,
            insecure=self.insecure,
            advice=advice,
        )
        return self


class OrchestratorLinkConfig(Config):
    """The orchestrator that batches come from."""

    endpoint: str = "tcp://127.0.0.1:29600"
    """Address of the orchestrator's batch server."""
    keys_dir: Path | None = None
    """Folder of CURVE keys (`rl keys DIR` makes one): this trainer's pair and the orchestrator's `server.public`.
    Needed when the orchestrator has keys."""
    key_name: Advanced[str] = Field("client", pattern=r"^client[A-Za-z0-9._-]*$")
    """This trainer's pair in `keys_dir`: `<key_name>.secret` and `<key_name>.public`. All ranks share it."""
    connect_timeout_s: float = Field(60.0, gt=0)
    """Seconds to wait for the orchestrator's first answer."""
    peer_timeout_s: Advanced[float] = Field(3.0, gt=0)
    """Seconds of silence (heartbeats go every second) after which the orchestrator counts as dead; the trainer
    reconnects."""
    lost_timeout_s: Advanced[float] = Field(600.0, gt=0)
    """Seconds without an orchestrator after which the trainer gives up with exit code 76."""


class FakeDataConfig(Config):
    """Random samples of one env, `fake`, made on the spot."""

    batch_size: int = Field(gt=0)
    """Samples per step, over all ranks."""
    lengths: Literal["fixed", "uniform", "lognormal"] = "lognormal"
    """Distribution of the samples' lengths."""
    mean_tokens: int = Field(256, ge=2)
    """Mean length of a sample, in tokens, before it is cut to `model.seq_len`."""


class DataConfig(Config):
    """Where samples come from, if not from an orchestrator."""

    fake: Advanced[FakeDataConfig | None] = None
    """Train on random samples, without an orchestrator, until `max_steps` or a signal."""


class TokenExportConfig(Config):
    """Per-token records of some sequences of every step, for analysis."""

    dir: Advanced[Path | None] = None
    """Folder for them, with a subfolder per step and a file per rank; `None`: `token_export` of the run directory."""
    max_sequences_per_step: int = Field(64, ge=1)
    """Most sequences that are recorded of one step, over all ranks."""
    sampling_rate: Advanced[float] = Field(1.0, gt=0, le=1)
    """Probability of a sequence to be recorded, before the limit."""


class ParallelConfig(Config):
    """How ranks share the work: world size = dp_replicate x dp_shard x cp, dp_shard being what is left."""

    dp_replicate: int = Field(1, ge=1)
    """Copies of the parameters (HSDP): each is sharded over world size / dp_replicate neighbouring ranks. More than one
    saves traffic between machines."""
    cp: int = Field(1, ge=1)
    """Neighbouring ranks that share each row of tokens (context parallelism), for samples too long for one device.
    Not with images, nor with a critic."""
    reshard_after_forward: Advanced[bool] = True
    """Free full parameters after the forward pass (less memory, more communication)."""
    timeout_s: Advanced[float] = Field(25.0, gt=0)
    """Seconds after which a collective fails: how soon a rank that fell silent is noticed (a killed one at once)."""


class TrainerConfig(ServiceConfig):
    """`trainer`: train a policy on batches from an orchestrator.

    Other commands: `trainer export --run RUN --out FOLDER`, `trainer check-loss IMPORT_PATH`."""

    model: ModelConfig
    """The model that is trained, and how it is held and computed."""
    orchestrator: OrchestratorLinkConfig = OrchestratorLinkConfig()
    """The orchestrator that batches come from."""
    max_steps: int | None = Field(None, gt=0)
    """Steps after which run and schedule end; `None`: when the orchestrator ends it (needs a constant schedule)."""
    replay: Path | None = None
    """Folder of recorded `step-*.batch` files to train on, without an orchestrator."""
    data: DataConfig = DataConfig()
    """Where samples come from, if not from an orchestrator."""
    seed: int = Field(0, ge=0)
    """Seed of torch in every rank, of the order of mini-batches, of fake data and of the token export's choice."""
    micro_batch_max_tokens: int | None = Field(None, gt=1)
    """Cap on one micro batch, in tokens; `None` means `model.seq_len`. Changes memory and speed, never the gradient."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps per batch and epoch: the batch is split into this many parts, by whole trajectories."""
    epochs: int = Field(1, ge=1)
    """Times that a batch is trained; after the first, its mini-batches come in another order."""
    pack_multimodal: Advanced[bool] = True
    """Vision-language models: text and image samples share micro batches. `false` keeps them apart. Changes speed, not
    the gradient."""
    weighting: Literal["token", "sample", "trajectory", "group"] = "token"
    """What counts alike in the mean that is minimised: every trained token, sample, trajectory or group."""
    loss: LossConfig = DppoLossConfig()
    """Loss of the tokens that have an advantage (algorithm `rl`)."""
    critic: CriticConfig | None = None
    """Make the advantages with a critic (PPO); off unless the table is there (it may be empty)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of the policy, and of a critic."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How the learning rate goes over the steps of the run."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints: what a trainer resumes from after a crash."""
    weights: WeightsConfig = WeightsConfig()
    """How the weights of every step get to the engines."""
    token_export: TokenExportConfig | None = None
    """Per-token records; off unless the table is there (it may be empty)."""
    parallel: ParallelConfig = ParallelConfig()
    """How the ranks share the work."""
    health: HealthConfig = HealthConfig(port=9102)
    """Health endpoint; the r-th rank of a machine binds port + r (0: each rank takes a free port)."""
    max_non_finite_steps: Advanced[int] = Field(3, ge=1)
    """Steps in a row with a non-finite loss or gradient after which the trainer stops with exit code 77."""
    num_threads: Advanced[int] = Field(1, gt=0)
    """Torch threads per rank on a CPU."""

    @property
    def micro_batch_tokens(self) -> int:
        """The cap that is in force."""
        return self.micro_batch_max_tokens or self.model.seq_len

    @model_validator(mode="after")
    def _check_rules(self) -> "TrainerConfig":
        if self.micro_batch_max_tokens is not None and self.micro_batch_max_tokens > self.model.seq_len:
            raise ValueError(
                f"micro_batch_max_tokens ({self.micro_batch_max_tokens}) is above model.seq_len ({self.model.seq_len})"
            )
        if self.data.fake is not None and self.micro_batch_max_tokens is not None:
            raise ValueError("micro_batch_max_tokens has no meaning with fake data: data.fake.batch_size rules there")
        if self.data.fake is not None and self.replay is not None:
            raise ValueError("replay and data.fake exclude each other: a batch comes from one place")
        if self.model.lora is not None and self.critic is not None:
            raise ValueError("model.lora and critic exclude each other: a critic trains, and saves, whole models")
        if self.parallel.cp > 1 and self.critic is not None:
            raise ValueError("parallel.cp and critic exclude each other: the critic values whole rows")
        if self.parallel.cp > 1 and sees_images(self.model.path):
            raise ValueError(
                "parallel.cp cannot be used with a vision-language model: an image would be cut between ranks"
            )
        if self.optimizer.type == "muon" and self.model.lora is not None:
            raise ValueError("optimizer.type = 'muon' is for whole matrices: an adapter (model.lora) needs 'adamw'")
        if self.schedule.type != "constant" and self.max_steps is None:
            raise ValueError(f"schedule.type = {self.schedule.type!r} needs max_steps")
        return self


class CheckLossConfig(Config):
    """`trainer check-loss IMPORT_PATH`: hold a loss of your own to what every loss must promise."""

    import_path: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:function`, as in `loss.import_path`."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function in `import_path`, as JSON."""


class ExportConfig(Config):
    """`trainer export`: write the model of a checkpoint as a Hugging Face folder."""

    checkpoint: Path | None = None
    """Checkpoint to export (`runs/<name>/checkpoints/step-...`)."""
    run: Path | None = None
    """Run directory whose newest valid checkpoint is exported (`runs/<name>`)."""
    out: Path
    """Folder to write; must not exist."""
    merged: bool = False
    """Of a LoRA run: write the whole model with the adapter merged into it. Without: the adapter in PEFT's format."""
    base: Path | None = None
    """With `merged`: folder of the base model, if it is not where the run had it."""

    @model_validator(mode="after")
    def _check_source(self) -> "ExportConfig":
        if (self.checkpoint is None) == (self.run is None):
            raise ValueError("give either --checkpoint or --run")
        if self.base is not None and not self.merged:
            raise ValueError("--base is for --merged: an adapter alone is exported without its base model")
        return self
