"""Which models are trained how, and what is refused at start-up, with the reason."""

import json
from pathlib import Path

import pytest
from torch import Tensor

from runtime.errors import UserError
from tests.trainer.core.tiny import save_tiny_model
from tests.trainer.images.conftest import Policies
from tests.trainer.images.image_ranks import CPU
from tests.trainer.images.tiny_vlm import SPEC, save_tiny_vlm
from trainer.checks.packing import verify_packing
from trainer.config.model import CriticConfig, ModelConfig
from trainer.critic.critic import load_critic
from trainer.errors import ModelUnusable
from trainer.model.fsdp import decoder_layers
from trainer.model.policy import load_policy
from trainer.model.vision import FAMILIES, validate_multimodal_pack
from trainer.planning.layout import RowSharing


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_the_image_side_of_a_model_comes_from_its_config(family: str, policies: Policies) -> None:
    assert policies[family].image_spec == SPEC
    assert policies[family].images is not None
    assert policies[family].images.family in FAMILIES


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize(("pack", "sharing"), [(True, RowSharing.ALL), (False, RowSharing.MODALITY)])
def test_samples_share_rows_as_asked(family: str, pack: bool, sharing: RowSharing, policies: Policies) -> None:
    assert validate_multimodal_pack(policies[family].images, pack_multimodal=pack) is sharing


def test_a_model_of_text_has_nothing_to_refuse() -> None:
    assert validate_multimodal_pack(None, pack_multimodal=True) is RowSharing.TEXT


def test_a_vision_model_that_is_not_in_the_table_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    with pytest.raises(UserError, match=r"qwen2_vl is a vision-language model .* knows qwen2_5_vl, qwen3_vl, qwen3_5"):
        load_policy(ModelConfig(path=tmp_path), CPU)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_vision_blocks_are_sharded_like_decoder_layers(family: str, policies: Policies) -> None:
    base = policies[family].causal_lm.base_model
    assert set(decoder_layers(policies[family].causal_lm)) == {*base.visual.blocks, *base.language_model.layers}


def test_a_model_with_positions_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(ModelConfig(path=save_tiny_vlm(tmp_path, "qwen3_vl"), seq_len=16), CPU)
    base = policy.causal_lm.base_model
    original = base.get_rope_index

    def shifted(**inputs: Tensor) -> tuple[Tensor, Tensor]:
        positions, deltas = original(**inputs)
        return positions + 1, deltas

    monkeypatch.setattr(base, "get_rope_index", shifted)
    with pytest.raises(ModelUnusable, match="other positions than this trainer"):
        verify_packing(policy, CPU)


@pytest.mark.parametrize("path", ["text", "qwen3_5", "qwen2_5_vl"])
def test_a_critic_that_does_not_see_as_the_policy_does_is_refused(
    path: str, policies: Policies, model_paths: dict[str, Path], tmp_path: Path
) -> None:
    """A critic of text would take image tokens for text; other families have other positions."""
    paths = model_paths | {"text": save_tiny_model(tmp_path)}
    model = ModelConfig(path=model_paths["qwen3_vl"], seq_len=16)
    with pytest.raises(ModelUnusable, match=r"the model of critic\.path does not see images as the policy does"):
        load_critic(CriticConfig(path=paths[path]), model, policies["qwen3_vl"], CPU)
