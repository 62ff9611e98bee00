"""What vLLM's server is started with. Needs no vLLM.

Names, shapes and digest of the files that vLLM loads: the same as the embedded engine finds in the model.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from inference.config import InferenceConfig
from inference.vllm_engine.checkpoint import checkpoint_digest, checkpoint_shapes
from inference.vllm_engine.command import (
    CONFIG_VARIABLE,
    ENTRY,
    STAGING_GRACE_S,
    WORKER_EXTENSION,
    config_from_environment,
    staging_timeout_s,
    vllm_command,
    vllm_environment,
)
from inference.weights.publish import model_digest, served_tensors
from runtime.errors import UserError
from tests.support.models import make_model, save_model


def config(**fields: object) -> InferenceConfig:
    return InferenceConfig.model_validate({"model": {"path": "models/tiny"}, "engine": "vllm"} | fields)


def flags(config: InferenceConfig, port: int = 8000) -> dict[str, str]:
    """Value by flag; a switch has the empty one."""
    words = vllm_command(config, port)[3:]
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {word: "" if value.startswith("--") else value for word, value in pairs if word.startswith("--")}


def test_command_runs_the_module_of_this_interpreter() -> None:
    assert vllm_command(config(), 1234)[:3] == (sys.executable, "-m", ENTRY)
    given = flags(config(), 1234)
    assert (given["--host"], given["--port"]) == ("127.0.0.1", "1234")
    assert given["--model"] == str(Path("models/tiny").resolve())
    assert given["--served-model-name"] == "tiny"


def test_command_names_our_extension_points_and_logprobs_at_the_temperature() -> None:
    given = flags(config())
    assert json.loads(given["--weight-transfer-config"]) == {"backend": "tandem"}
    assert given["--worker-extension-cls"] == WORKER_EXTENSION
    assert given["--logprobs-mode"] == "processed_logprobs"


def test_length_is_the_models_own_unless_it_is_set() -> None:
    assert "--max-model-len" not in flags(config())
    assert flags(config(vllm={"max_model_len": 77}))["--max-model-len"] == "77"


def test_parallel_sizes_memory_and_eagerness_are_passed_on() -> None:
    vllm = {"tensor_parallel_size": 4, "data_parallel_size": 2, "gpu_memory_utilization": 0.5, "enforce_eager": False}
    given = flags(config(vllm=vllm))
    assert (given["--tensor-parallel-size"], given["--data-parallel-size"]) == ("4", "2")
    assert given["--gpu-memory-utilization"] == "0.5"
    assert "--enforce-eager" not in given
    assert "--enforce-eager" in flags(config())


def test_adapters_are_off_unless_a_rank_is_set_and_the_rank_is_one_that_vllm_takes() -> None:
    assert "--enable-lora" not in flags(config())
    given = flags(config(vllm={"max_lora_rank": 12, "max_loras": 3}))
    assert "--enable-lora" in given
    assert (given["--max-lora-rank"], given["--max-loras"]) == ("16", "3")


def test_extra_arguments_come_last() -> None:
    command = vllm_command(config(vllm={"extra_args": ["--max-num-seqs", "3"]}), 1)
    assert command[-2:] == ("--max-num-seqs", "3")


@pytest.mark.parametrize("flag", ["--port", "--api-key=x", "--worker-extension-cls", "--weight-transfer-config"])
def test_extra_arguments_must_not_take_what_is_ours(flag: str) -> None:
    with pytest.raises(ValidationError, match="set by this service"):
        config(vllm={"extra_args": [flag]})


def test_device_is_not_chosen_here() -> None:
    with pytest.raises(ValidationError, match="built for"):
        config(model={"path": "x", "device": "cuda:1"})


def test_environment_keeps_what_the_user_set_but_not_dev_mode_and_plugins() -> None:
    base = {
        "OMP_NUM_THREADS": "8",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_PLUGINS": "other",
        "HOME": "/h",
        "VLLM_API_KEY": "k",
    }
    environment = vllm_environment(config(), base)
    assert (environment["OMP_NUM_THREADS"], environment["HOME"]) == ("8", "/h")
    assert (environment["VLLM_SERVER_DEV_MODE"], environment["VLLM_PLUGINS"]) == ("0", "tandem")
    assert environment["VLLM_API_KEY"] == ""
    assert vllm_environment(config(), {})["OMP_NUM_THREADS"] == "1"


def test_kv_cache_on_a_cpu_is_the_users_by_vllms_own_variable() -> None:
    assert vllm_environment(config(), {})["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert vllm_environment(config(), {"VLLM_CPU_KVCACHE_SPACE": "7"})["VLLM_CPU_KVCACHE_SPACE"] == "7"


def test_config_comes_back_out_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = tmp_path / "admin.token"
    token.write_text("very secret")
    given = config(admin_token_file=token, vllm={"max_loras": 5, "extra_args": ["-x"]}, run={"name": "r7"})
    environment = vllm_environment(given, {})
    assert "very secret" not in "".join(environment.values())
    monkeypatch.setenv(CONFIG_VARIABLE, environment[CONFIG_VARIABLE])
    assert config_from_environment() == given


def test_plugin_without_our_service_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="inference --engine vllm"):
        config_from_environment()


@pytest.mark.parametrize("timeout_s", [1.0, 600.0, 7200.0])
def test_workers_have_the_time_that_the_user_allows_for_a_transfer(timeout_s: float) -> None:
    given = config(weights={"timeout_s": timeout_s})
    assert timeout_s < staging_timeout_s(given) <= timeout_s + STAGING_GRACE_S


def test_digest_is_that_of_the_loaded_model(model: PreTrainedModel, model_dir: Path) -> None:
    assert checkpoint_digest(model_dir, torch.float32) == model_digest(model)


def test_digest_is_of_the_type_that_is_served(model_dir: Path) -> None:
    assert checkpoint_digest(model_dir, torch.bfloat16) == model_digest(make_model().to(torch.bfloat16))


def test_digest_does_not_depend_on_the_files(tmp_path: Path, model: PreTrainedModel, model_dir: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert checkpoint_digest(tmp_path, torch.float32) == checkpoint_digest(model_dir, torch.float32)


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_are_those_of_a_publish(tmp_path: Path, tied: bool) -> None:
    model = make_model(tied=tied)
    expected = {name: tuple(tensor.shape) for name, tensor in served_tensors(model)}
    assert checkpoint_shapes(save_model(tmp_path, model)) == expected
    assert ("lm_head.weight" in expected) is not tied


def test_stored_copy_of_a_tied_head_is_left_out(tmp_path: Path, model: PreTrainedModel) -> None:
    save_model(tmp_path, model)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    assert checkpoint_digest(tmp_path, torch.float32) == model_digest(model)


def test_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="safetensors"):
        checkpoint_shapes(tmp_path)


def test_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"model\.safetensors is not"):
        checkpoint_shapes(tmp_path)
