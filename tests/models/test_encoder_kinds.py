"""Encoders of every kind: their rows are the right ones, and as many as their config and inputs tell."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.models.encoder_kinds import count_rows, encode, encoder_of, input_names, own_inputs, width
from models.tiny_encoders import ENCODERS, available, inputs_of

pytestmark = pytest.mark.usefixtures("float64")
PREFIX = {
    "clip": 1,
    "siglip": 0,
    "vit": 1,
    "dinov2": 1,
    "dinov2_registers": 5,
    "dinov3": 5,
    "internvl": 1,
    "eva": 1,
    "vit_timm": 1,
}
MERGED = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
ONLY_RESULT = {*MERGED, "qwen2_audio", "wav2vec2_adapter", "phi4_audio"}


def built(name: str) -> nn.Module:
    if not available(name):
        pytest.skip("needs timm")
    torch.manual_seed(0)
    return ENCODERS[name]().double().eval()


def part(name: str, inputs: dict[str, Tensor], item: int) -> dict[str, Tensor]:
    """The inputs of one item, without its padding where the encoder pays no heed to it."""
    if name in MERGED:
        grids = inputs["image_grid_thw"]
        patches = inputs["pixel_values"].split(grids.prod(1).tolist())
        return {"pixel_values": patches[item], "image_grid_thw": grids[item : item + 1]}
    own = {key: value[item : item + 1] for key, value in inputs.items()}
    if name == "pixtral":
        height, width = own["image_sizes"][0].tolist()
        return {"pixel_values": own["pixel_values"][..., :height, :width]}
    if name == "siglip2":
        count = int(own["pixel_attention_mask"].sum())
        return {**own, **{key: own[key][:, :count] for key in ("pixel_values", "pixel_attention_mask")}}
    if name == "wav2vec2":
        return {"input_values": own["input_values"][:, : int(own["feature_attention_mask"].sum())]}
    return own


@pytest.mark.parametrize("name", ENCODERS)
def test_counts_are_those_of_the_encoder_for_inputs_of_any_size(name: str) -> None:
    model = built(name)
    seen = set()
    for seed in range(12):
        inputs = inputs_of(name, seed)
        result = encode(model, inputs)
        assert count_rows(model.config, inputs) == result.sizes
        assert result.rows.shape == (sum(size.length for size in result.sizes), width(model.config))
        for size in result.sizes:
            assert size.grid is None or size.frames * size.grid[0] * size.grid[1] == size.length
        seen |= {size.length for size in result.sizes}
    assert len(seen) > 1 or name in ("eva", "vit_timm", "swin")  # which take one size only


@pytest.mark.parametrize("name", ENCODERS)
def test_each_item_has_the_rows_that_it_has_alone(name: str) -> None:
    model = built(name)
    inputs = inputs_of(name, seed=3)
    together = encode(model, inputs)
    items = together.rows.split([size.length for size in together.sizes])
    for at, rows in enumerate(items):
        torch.testing.assert_close(encode(model, part(name, inputs, at)).rows, rows, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", PREFIX)
def test_class_and_register_tokens_are_dropped(name: str) -> None:
    model, inputs = built(name), inputs_of(name)
    states = model(**inputs).last_hidden_state
    length = states.shape[1] - PREFIX[name]
    result = encode(model, inputs)
    assert [size.length for size in result.sizes] == [length] * len(states)
    torch.testing.assert_close(result.rows.view(len(states), length, -1), states[:, PREFIX[name] :], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("config", "options", "inputs", "length"),
    [
        ("CLIPVisionConfig", {"image_size": 336, "patch_size": 14}, {"pixel_values": (1, 3, 336, 336)}, 576),
        ("SiglipVisionConfig", {"image_size": 384, "patch_size": 14}, {"pixel_values": (1, 3, 384, 384)}, 729),
        ("Dinov2Config", {"patch_size": 14}, {"pixel_values": (1, 3, 224, 224)}, 256),
        ("InternVLVisionConfig", {}, {"pixel_values": (1, 3, 448, 448)}, 1024),
        ("PixtralVisionConfig", {}, {"pixel_values": (1, 3, 1024, 768)}, 64 * 48),
        ("WhisperConfig", {}, {"input_features": (1, 80, 3000)}, 1500),
        ("Qwen2AudioEncoderConfig", {}, {"input_features": (1, 128, 3000)}, 750),
        ("Wav2Vec2Config", {}, {"input_values": (1, 16000)}, 49),
        ("HubertConfig", {}, {"input_values": (1, 160000)}, 499),
    ],
    ids=str,
)
def test_counts_of_published_sizes_are_the_customary_ones(
    config: str, options: dict[str, int], inputs: dict[str, tuple[int, ...]], length: int
) -> None:
    tensors = {name: torch.empty(shape, device="meta") for name, shape in inputs.items()}
    sizes = count_rows(getattr(transformers, config)(**options), tensors)
    assert [size.length for size in sizes] == [length]


def test_features_of_a_layer_are_its_hidden_states() -> None:
    for name in set(ENCODERS) - ONLY_RESULT - {"eva", "vit_timm", "convnext", "swin"}:
        model, inputs = built(name), inputs_of(name)
        call = own_call(model, name, inputs)
        states = model(**call, output_hidden_states=True).hidden_states[-2]
        rows = encode(model, inputs, -2).rows
        assert rows.shape == encode(model, inputs).rows.shape
        first = states.squeeze(0)[0] if name == "pixtral" else states[0, PREFIX.get(name.removesuffix("_video"), 0)]
        torch.testing.assert_close(rows[0], first, rtol=0, atol=1e-12)


def own_call(model: nn.Module, name: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs as the encoder's own forward takes them."""
    if name.endswith("_video"):
        return {"pixel_values": inputs["pixel_values"].flatten(0, 1)}
    renamed = {"feature_attention_mask": "attention_mask"}
    without = {"feature_attention_mask"} if name in ("whisper", "hubert") else set()
    return {renamed.get(key, key): value for key, value in inputs.items() if key not in without}


@pytest.mark.parametrize("name", ["qwen2_vl", "phi4_audio", "convnext"])
def test_layers_that_give_no_such_rows_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="feature_layer: got -2"):
        encode(built(name), inputs_of(name), -2)


def test_layers_that_an_encoder_lacks_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 3 hidden states"):
        encode(built("clip"), inputs_of("clip"), -4)


def test_frames_that_a_video_lacks_have_no_rows() -> None:
    model, inputs = built("clip_video"), inputs_of("clip_video")
    inputs["num_frames"] = torch.tensor([2, 3, 1])
    result = encode(model, inputs)
    assert [(size.length, size.frames) for size in result.sizes] == [(18, 2), (27, 3), (9, 1)]
    alone = encode(model, {"pixel_values": inputs["pixel_values"][2, :1]})
    torch.testing.assert_close(result.rows[45:], alone.rows, rtol=0, atol=1e-12)


def test_a_missing_input_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="Pass 'image_grid_thw'"):
        encode(built("qwen2_vl"), {"pixel_values": torch.zeros(4, 96)})


def test_grids_that_do_not_fit_the_patches_are_refused() -> None:
    model, inputs = built("siglip2"), inputs_of("siglip2")
    with pytest.raises(ConfigError, match="rows of features, where its inputs tell"):
        encode(_Truncated(model), inputs)


class _Truncated(nn.Module):
    """An encoder of Siglip's that loses the last image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).last_hidden_state[:-1]


def test_names_of_processors_become_those_of_the_encoder() -> None:
    wave = {"input_values": torch.zeros(1, 9), "attention_mask": torch.ones(1, 9), "other": torch.zeros(1)}
    assert list(own_inputs(built("wav2vec2"), wave)) == ["input_values", "feature_attention_mask"]
    video = {"pixel_values_videos": torch.zeros(1), "video_grid_thw": torch.zeros(1)}
    assert list(own_inputs(built("qwen2_vl").config, video)) == ["pixel_values", "image_grid_thw"]


def test_a_single_item_of_an_extractor_that_makes_no_mask_then_has_one() -> None:
    model, frames = built("phi4_audio"), torch.zeros(1, 9, 16)
    found = own_inputs(model, {"audio_input_features": frames, "audio_embed_sizes": torch.tensor([3])})
    assert found["feature_attention_mask"].shape == (1, 9)
    assert [size.length for size in encode(model, found).sizes] == [3]


def test_the_encoder_of_a_larger_model_is_found() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 8}, vision_config={**sizes, "image_size": 8, "patch_size": 4}
    )
    clip = transformers.CLIPModel(config)
    assert encoder_of(clip) is clip.vision_model
    assert encoder_of(clip.vision_model) is clip.vision_model


def test_encoders_of_ones_own_are_known_by_their_results() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, points: Tensor) -> Tensor:
            return self.layer(points)

    assert input_names(Own()) == ("points",)
    result = encode(Own(), {"points": torch.randn(2, 5, 4)})
    assert [size.length for size in result.sizes] == [5, 5]
    assert result.rows.shape == (10, 6)
