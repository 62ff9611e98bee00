"""`probe_sample`: made-up samples, for checks at start-up, canaries, `check-loss` and fake data."""

from typing import Any

import numpy as np
import numpy.typing as npt

from transport.wire.sample import TrainingSample
from transport.wire.tensor import EncodedTensor


def probe_sample(
    token_ids: npt.NDArray[np.integer[Any]],
    is_trained: npt.NDArray[np.bool_] | bool = True,
    *,
    env_name: str = "probe",
    group: int = 0,
    member: int = 0,
    **fields: Any,
) -> TrainingSample:
    """Member `member` of group `group`; the first token is never trained. `fields` are others of `TrainingSample`."""
    group_id = f"{env_name}/{group}/0"
    defaults: dict[str, Any] = {
        "run_id": env_name,
        "logprobs": EncodedTensor.of(np.zeros(len(token_ids), dtype=np.float32)),
        "advantages": 0.0,
        "reward": 0.0,
    }
    return TrainingSample(
        env_name=env_name,
        example_id=str(group),
        group_id=group_id,
        trajectory_id=f"{group_id}#{member}",
        token_ids=EncodedTensor.of(token_ids.astype(np.int32)),
        loss_mask=EncodedTensor.of((np.arange(len(token_ids)) > 0) & is_trained),
        temperature=1.0,
        versions=(),
        **(defaults | fields),
    )
