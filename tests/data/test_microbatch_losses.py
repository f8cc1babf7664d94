"""The loss of a batch is the weighted loss of the microbatches that it is cut into, packed images included."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lightning_mm5d.data.joining import merge
from lightning_mm5d.data.microbatch import split
from lightning_mm5d.data.packed_images import describe
from packed_batches import IMAGE, VIDEO, ids, numbered

TEXT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tiny_llava() -> torch.nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=8, patch_size=4, **vision),
        text_config=LlamaConfig(**TEXT, pad_token_id=0),
        image_token_index=IMAGE,
        image_seq_length=4,
    )
    return LlavaForConditionalGeneration(config)


def tiny_qwen2_vl() -> torch.nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=4,
        vision_end_token_id=5,
    )
    return Qwen2VLForConditionalGeneration(config)


def llava_batch() -> dict[str, Tensor]:
    image = [IMAGE] * 4
    return {"input_ids": ids(image * 2, [], image, image), "pixel_values": torch.randn(4, 3, 8, 8)}


def qwen2_vl_batch() -> dict[str, Tensor]:
    """Images of 4, 16 and 8 patches: 1, 4 and 2 tokens."""
    small, large, wide = [4, IMAGE, 5], [4, *[IMAGE] * 4, 5], [4, *[IMAGE] * 2, 5]
    tokens = ids(small + large, [], [], wide)
    return {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == IMAGE).int(),
        "pixel_values": torch.randn(28, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 4], [1, 2, 4]]),
    }


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize(("build", "make"), [(tiny_llava, llava_batch), (tiny_qwen2_vl, qwen2_vl_batch)])
def test_the_loss_of_the_batch_is_the_weighted_loss_of_its_microbatches(build: Any, make: Any, parts: int) -> None:
    torch.manual_seed(0)
    model, batch = build().eval(), make()
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][:, :-8] = -100
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    with torch.no_grad():
        whole = model(**batch).loss
        microbatches = split(batch, parts, image_tokens=describe(model))
        losses = [model(**microbatch.batch).loss for microbatch in microbatches]
    joined = merge(losses, [microbatch.samples for microbatch in microbatches])
    assert len(losses) == parts
    torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-6)


def test_a_model_that_cannot_be_called_without_images_gets_none_of_them_as_no_rows() -> None:
    with torch.device("meta"):
        models = (
            transformers.Blip2ForConditionalGeneration(transformers.Blip2Config(image_token_index=IMAGE)),
            transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(image_token_index=IMAGE)),
        )
    batch = {"input_ids": ids([IMAGE], [], [IMAGE]), "pixel_values": numbered(2, 3, 4, 4)}
    blip, llava = (split(batch, 3, image_tokens=describe(model))[1].batch["pixel_values"] for model in models)
    assert blip.shape == (0, 3, 4, 4)
    assert llava is None
