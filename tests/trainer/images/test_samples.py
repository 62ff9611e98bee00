"""Which samples are trained, which are left out and why, and where long ones are cut."""

import msgspec
import numpy as np
import pytest
import torch

from tests.trainer.images.tiny_vlm import IMAGE_TOKEN, MIXED, SPEC, draw, draw_all, plain_positions
from trainer.images.samples import check_image_samples, cut_sample, why_refused
from trainer.images.spec import ImageSpec, block_starts, grids_of, image_tokens_of, rope_positions
from trainer.planning.pack import pack
from transport.wire.codec import encode_sample
from transport.wire.sample import EncodedTensor, TrainingSample, VersionSpan

SEQ_LEN = 24


def encoded(values: object, dtype: str) -> EncodedTensor:
    return EncodedTensor.of(np.asarray(values, dtype=dtype))


def with_tensor(sample: TrainingSample, name: str, tensor: EncodedTensor) -> TrainingSample:
    return msgspec.structs.replace(sample, mm_kwargs=sample.mm_kwargs | {name: tensor})


def with_token(sample: TrainingSample, place: int, token: int) -> TrainingSample:
    token_ids = sample.token_ids.numpy().copy()
    token_ids[place] = token
    return msgspec.structs.replace(sample, token_ids=EncodedTensor.of(token_ids))


def with_types(sample: TrainingSample, types: list[int] | None) -> TrainingSample:
    return msgspec.structs.replace(sample, mm_token_type_ids=None if types is None else encoded(types, "uint8"))


@pytest.mark.parametrize("drawing", [*MIXED, "x.x", "b", "sss..x"])
def test_sound_samples_pass(drawing: str) -> None:
    assert why_refused(draw(drawing), SPEC, SEQ_LEN) is None


IMAGE = draw("..b.s.xx")
"""12 tokens: images at 2..5 and 7."""
PIXELS, GRIDS = IMAGE.mm_kwargs["pixel_values"], IMAGE.mm_kwargs["image_grid_thw"]
TYPES = [0, 0, 1, 1, 1, 1, 0, 1, 0, 0, 0]

WRONG = {
    "text with the image token": (with_token(draw("....xx"), 5, IMAGE_TOKEN), "has the image token 60 1 times but no"),
    "text marked as image": (with_types(draw("..xx"), [0, 1, 0, 0]), "marks image tokens but has no image"),
    "a completion with the image token": (with_token(IMAGE, 9, IMAGE_TOKEN), "where mm_token_type_ids says text"),
    "an image token of another kind": (with_token(IMAGE, 3, 7), "where mm_token_type_ids says text, or the reverse"),
    "too few image tokens": (with_types(IMAGE, [*TYPES[:5], 0, *TYPES[6:]]), "marks 4 image tokens, but its 2 images"),
    "a block with a hole": (with_token(with_types(IMAGE, [0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0]), 5, 1), "says text"),
    "no types": (with_types(IMAGE, None), "no mm_token_type_ids"),
    "video": (with_types(IMAGE, [2, *TYPES[1:]]), "tokens of modality 2"),
    "another name": (with_tensor(IMAGE, "video_grid_thw", GRIDS), "has mm_kwargs"),
    "grids of floats": (with_tensor(IMAGE, "image_grid_thw", encoded(GRIDS.numpy(), "float32")), "three integers"),
    "two frames": (with_tensor(IMAGE, "image_grid_thw", encoded([[2, 4, 2], [1, 2, 2]], "int64")), "one frame"),
    "an odd side": (with_tensor(IMAGE, "image_grid_thw", encoded([[1, 16, 1], [1, 2, 2]], "int64")), "multiples of 2"),
    "a negative side": (with_tensor(IMAGE, "image_grid_thw", encoded([[1, -4, -4], [1, 2, 2]], "int64")), "one frame"),
    "other patches": (
        with_tensor(IMAGE, "pixel_values", encoded(PIXELS.numpy()[:, :40], "float32")),
        "the model takes",
    ),
    "pixels of bytes": (
        with_tensor(IMAGE, "pixel_values", encoded(PIXELS.numpy(), "uint8")),
        "the model takes float32",
    ),
    "a patch too few": (with_tensor(IMAGE, "pixel_values", encoded(PIXELS.numpy()[1:], "float32")), "has 19 patches"),
    "a pixel that is no number": (
        with_tensor(IMAGE, "pixel_values", encoded(PIXELS.numpy() * np.nan, "float32")),
        "not finite",
    ),
    "a trained image token": (
        msgspec.structs.replace(IMAGE, loss_mask=encoded([0] + [1] * 10, "bool")),
        "trains image",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_sample_whose_images_do_not_add_up_is_left_out_by_name_and_no_other(name: str) -> None:
    sample, reason = WRONG[name]
    good = draw("..b.s.xx", index=1)
    checked = check_image_samples({3: good, 8: sample}, SPEC, SEQ_LEN)
    assert list(checked.samples) == [3]
    assert list(checked.refused) == [8]
    assert checked.refused[8].startswith("copy/0/0#0 of example 0 of env 'copy' ")
    assert reason in checked.refused[8]


def test_a_block_with_another_token_inside_is_refused() -> None:
    broken = with_types(draw(".b..x"), [0, 1, 1, 0, 1, 1, 0, 0])
    token_ids = [1, IMAGE_TOKEN, IMAGE_TOKEN, 1, IMAGE_TOKEN, IMAGE_TOKEN, 1, 1]
    broken = msgspec.structs.replace(broken, token_ids=encoded(token_ids, "int32"))
    assert "another token inside the tokens of an image" in str(why_refused(broken, SPEC, SEQ_LEN))


def test_a_model_of_text_looks_at_nothing() -> None:
    sample = with_token(draw("....xx"), 5, IMAGE_TOKEN)
    assert check_image_samples({0: sample}, None, SEQ_LEN).samples[0] is sample


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_pixels_pass_unless_they_are_not_finite(dtype: str) -> None:
    halves = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    pixels = torch.from_numpy(PIXELS.numpy().copy()).to(halves[dtype])
    for value, is_sound in ((1.0, True), (float("inf"), False), (float("nan"), False)):
        pixels[3, 3] = value
        data = memoryview(pixels.view(torch.uint8).numpy().tobytes())
        sample = with_tensor(IMAGE, "pixel_values", EncodedTensor(dtype, PIXELS.shape, data))  # type: ignore[arg-type]
        assert (why_refused(sample, SPEC, SEQ_LEN) is None) == is_sound


def test_pixels_of_one_type_are_merged_in_it_and_mixed_ones_in_float32() -> None:
    pixels = torch.from_numpy(PIXELS.numpy().copy()).bfloat16()
    data = memoryview(pixels.view(torch.uint8).numpy().tobytes())
    half = with_tensor(IMAGE, "pixel_values", EncodedTensor("bfloat16", PIXELS.shape, data))
    merged = [pack(samples, [0, 0], [0, 1], images=SPEC).images for samples in ([half, half], [half, IMAGE])]
    assert merged[0] is not None
    assert merged[1] is not None
    assert torch.equal(merged[0].pixel_values, torch.cat((pixels, pixels)))
    assert torch.equal(merged[1].pixel_values, torch.cat((pixels.float(), torch.from_numpy(PIXELS.numpy().copy()))))


@pytest.mark.parametrize(
    ("seq_len", "length", "num_images"),
    [(11, 11, 2), (8, 8, 2), (7, 7, 1), (6, 6, 1), (5, 2, 0), (4, 2, 0), (3, 2, 0), (2, 2, 0)],
)
def test_a_cut_moves_to_the_start_of_the_image_it_would_split(seq_len: int, length: int, num_images: int) -> None:
    sample = msgspec.structs.replace(IMAGE, versions=(VersionSpan(0, 1, 4), VersionSpan(1, 9, 11)))
    cut = cut_sample(sample, SPEC, seq_len)
    assert cut.num_tokens == length
    assert len(grids_of(cut)) == num_images
    assert cut.token_ids.numpy().tolist() == sample.token_ids.numpy()[:length].tolist()
    if num_images:
        kept = cut.mm_kwargs["pixel_values"].numpy()
        assert np.array_equal(kept, PIXELS.numpy()[: grids_of(cut).prod(axis=1).sum()])
    assert why_refused(cut, SPEC, SEQ_LEN) is None
    encode_sample(cut)  # checks every other column


def test_a_cut_between_images_that_touch_keeps_the_first() -> None:
    cut = cut_sample(draw(".sb.xx"), SPEC, 4)
    assert cut.num_tokens == 2
    assert grids_of(cut).tolist() == [[1, 2, 2]]


def test_a_sample_of_which_nothing_can_stay_is_left_out() -> None:
    assert "opens with an image that is longer than model.seq_len (3)" in str(why_refused(draw("b.xx"), SPEC, 3))


@pytest.mark.parametrize("spec", [SPEC, None])
def test_a_long_text_is_cut_too(spec: ImageSpec | None) -> None:
    cut = check_image_samples({0: draw("." * 20 + "x" * 20)}, spec, SEQ_LEN).samples[0]
    assert cut.num_tokens == SEQ_LEN
    encode_sample(cut)  # checks every other column


@pytest.mark.parametrize("drawing", [drawing for drawing in MIXED if any(kind in drawing for kind in "swb")])
def test_positions_are_those_of_a_plain_count(drawing: str) -> None:
    sample = draw(drawing)
    grids = grids_of(sample)
    starts = block_starts(image_tokens_of(sample), grids, SPEC)
    assert np.array_equal(rope_positions(sample.num_tokens, starts, grids, SPEC), plain_positions(sample).numpy())


def test_a_row_has_positions_and_image_places_of_every_sample_and_padding_behind() -> None:
    samples = draw_all("..s.x", "...x", "w.x")
    batch = pack(samples, [0] * 3, range(3), pad_multiple=8, images=SPEC, needs_image=True)
    assert batch.seq_lens == (5, 4, 5, 2)
    assert batch.images is not None
    assert batch.images.token_index.tolist() == [2, 9, 10, 11]
    assert batch.images.grids.tolist() == [[1, 2, 2], [1, 2, 6]]
    assert batch.images.positions[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0, 3, 4, 0, 1]
    assert batch.images.positions[2].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]
    assert (batch.images.num_images, batch.images.num_tokens, batch.images.num_patches) == (2, 4, 16)


def test_a_row_without_images_gets_a_dummy_only_where_others_have_one() -> None:
    samples = draw_all("...x", "..xx")
    assert pack(samples, [0, 0], [0, 1], images=SPEC).images is None
    for chosen, seq_lens in ((samples, (4, 4, 1)), ([], (1,))):
        batch = pack(chosen, [0] * len(chosen), range(len(chosen)), images=SPEC, needs_image=True)
        assert batch.seq_lens == seq_lens
        assert batch.images is not None
        assert batch.images.token_index.tolist() == [sum(seq_lens) - 1]
        assert (batch.images.num_images, batch.num_tokens) == (0, sum(seq_lens) - 1)
        assert batch.is_dummy == (not chosen)
