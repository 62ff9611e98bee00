import safetensors.torch
import torch

from trainer.weights.local_ranges import raw_bytes, spec_of
from trainer.weights.safetensors_layout import plan_shards


def assemble(tensors: dict[str, torch.Tensor]) -> bytes:
    """The file that the layout describes, written tensor by tensor."""
    (shard,) = plan_shards(spec_of(name, tensor) for name, tensor in tensors.items())
    content = bytearray(shard.num_bytes)
    content[: len(shard.head)] = shard.head
    for name, start in shard.starts.items():
        data = raw_bytes(tensors[name])
        content[start : start + len(data)] = data
    return bytes(content)


def test_layout_is_that_of_the_safetensors_library_byte_for_byte():
    tensors = {
        "b.weight": torch.randn(5, 3),
        "a": torch.randn(7).to(torch.bfloat16),
        "z": torch.arange(4),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "mask": torch.tensor([True, False]),
        "ä": torch.ones(2),
    }
    assert assemble(tensors) == safetensors.torch.save(tensors, metadata={"format": "pt"})


def test_a_file_is_full_before_the_next_begins_and_all_tensors_have_a_place():
    specs = [spec_of(f"w{index}", torch.zeros(25)) for index in range(5)]
    shards = plan_shards(specs, max_bytes=200)
    assert [list(shard.starts) for shard in shards] == [["w0", "w1"], ["w2", "w3"], ["w4"]]
    assert [shard.file for shard in shards] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def test_a_tensor_above_the_limit_has_a_file_of_its_own():
    specs = [spec_of(name, torch.zeros(size)) for name, size in {"a": 1, "b": 100, "c": 1}.items()]
    assert [list(shard.starts) for shard in plan_shards(specs, max_bytes=8)] == [["a"], ["b"], ["c"]]


def test_layout_does_not_depend_on_the_order_of_the_tensors():
    specs = [spec_of(name, torch.zeros(2, 2)) for name in "cab"]
    assert plan_shards(specs) == plan_shards(reversed(specs))
