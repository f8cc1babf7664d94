"""Composed models on one process: their parts, what is saved, counts, callbacks, generation, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPConfig,
    CLIPModel,
    GPT2Model,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from lightning_mm5d import ConfigError, ModalityEncoder, MultimodalConfig, MultimodalModel, ProjectorConfig
from lightning_mm5d.config.errors import CheckpointUntrustedError
from lightning_mm5d.models.modality_encoder import feature_counts
from lightning_mm5d.models.multimodal_model import Placeholders

from .composed import IDS, MODELS, SMALL, WIDTH, batch, build, clip, compose, gpt2, inputs, llama, pixtral, whisper

COUNTS = {"vision": [2, 0, 1], "audio": [0, 0, 1], "depth": [1, 0, 2]}
KINDS = {
    "linear": ProjectorConfig(kind="linear", bias=False),
    "mlp": ProjectorConfig(depth=3, activation="silu"),
    "pixel_shuffle": ProjectorConfig(kind="pixel_shuffle"),
    "average_pool": ProjectorConfig(kind="average_pool", kernel=3),
    "query_former": ProjectorConfig(kind="query_former", queries=3, heads=2, layers=1),
}


class OwnProjector(nn.Module):
    """Halves the number of rows."""

    def __init__(self, out: int = WIDTH) -> None:
        super().__init__()
        self.config = {"out": out}
        self.linear = nn.Linear(2 * 16, out)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.linear(features.unflatten(1, (-1, 2)).flatten(2))


def batch_of(model: Any, seed: int = 0, **counts: list[int]) -> dict[str, Any]:
    return batch(model, counts or {name: COUNTS[name] for name in model.encoders}, seed)


def output(model: Any, given: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**given).logits


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_computes_what_it_did(name: str, tmp_path: Path) -> None:
    model = build(name).model
    given = batch_of(model)
    expected = output(model, given)
    model.save_pretrained(tmp_path)
    for cls in (MultimodalModel, AutoModelForImageTextToText):
        loaded = cls.from_pretrained(tmp_path)
        assert list(loaded.state_dict()) == list(model.state_dict())
        torch.testing.assert_close(output(loaded, given), expected, rtol=1e-5, atol=1e-6)
    assert loaded.config.to_dict()["encoders"] == model.config.to_dict()["encoders"]
    again = MultimodalModel(AutoConfig.from_pretrained(tmp_path))
    assert {key: value.shape for key, value in again.state_dict().items()} == {
        key: value.shape for key, value in model.state_dict().items()
    }


def test_parts_are_taken_as_they_are() -> None:
    encoder, language = clip(), llama(attn_implementation="eager")
    before = {id(p): p.detach().clone() for part in (encoder, language) for p in part.parameters()}
    own = nn.Linear(16, WIDTH)  # may be any module
    weight = own.weight.detach().clone()
    model = compose({"vision": ModalityEncoder(encoder, own)}, language)
    assert all(torch.equal(p, before[id(p)]) for part in (encoder, language) for p in part.parameters())
    assert torch.equal(own.weight, weight)
    assert model.language_model is language
    assert model.encoders["vision"].model is encoder
    assert language.config._attn_implementation == "eager"
    assert clip().config._attn_implementation == encoder.config._attn_implementation


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [clip, pixtral, whisper])
def test_counts_are_those_of_the_features(kind: str, make: Any) -> None:
    name = "audio" if make is whisper else "vision"
    if make is whisper and kind == "pixel_shuffle":
        return
    model = compose({name: ModalityEncoder(make(), KINDS[kind])})
    own = inputs(model, name, 4, torch.Generator().manual_seed(0))
    counts = model.num_features(name, **own)
    assert len(model.encoders[name](own)) == sum(counts)
    assert len(set(counts)) == (3 if make is pixtral and kind not in ("query_former",) else 1)
    plain = MultimodalConfig.from_dict(model.config.to_dict())
    assert feature_counts(plain, name, own) == counts


def test_each_item_is_projected_as_if_it_were_alone() -> None:
    for kind in KINDS.values():
        encoder = compose({"vision": ModalityEncoder(pixtral(), kind)}).encoders["vision"].eval()
        own = inputs(MultimodalModelOf(encoder), "vision", 4, torch.Generator().manual_seed(0))
        alone = [encoder({name: value[i : i + 1] for name, value in own.items()}) for i in range(4)]
        torch.testing.assert_close(encoder(own), torch.cat(alone), rtol=1e-4, atol=1e-5)


class MultimodalModelOf:
    def __init__(self, encoder: nn.Module) -> None:
        self.encoders = {"vision": encoder}


def test_features_stand_at_the_placeholders_of_their_samples() -> None:
    model = build("two").model.eval()
    given = batch_of(model)
    whole = output(model, given)
    for sample in range(3):
        counts = {name: [COUNTS[name][sample]] for name in model.encoders}
        alone = {key: given[key][sample : sample + 1] for key in ("input_ids", "attention_mask")}
        for name, (count,) in counts.items():
            start = sum(COUNTS[name][:sample])
            for key in model.encoder_inputs[name].values():
                if key in given and count:
                    alone[key] = given[key][start : start + count]
        torch.testing.assert_close(output(model, alone)[0], whole[sample], rtol=1e-4, atol=1e-5)


def test_two_encoders_with_one_input_name_have_keys_of_their_own() -> None:
    model = build("one input name").model
    assert model.encoder_inputs["vision"]["pixel_values"] == "vision_pixel_values"
    assert model.encoder_inputs["depth"]["pixel_values"] == "depth_pixel_values"
    given = batch_of(model)
    changed = given | {"depth_pixel_values": given["depth_pixel_values"] + 1}
    moved = (output(model, given) - output(model, changed)).abs().amax(dim=(1, 2)) > 0
    assert moved.tolist() == [True, False, True]


def test_text_alone_works_and_a_batch_may_lack_items() -> None:
    model = build("two").model
    tokens = torch.randint(8, 64, (2, 6))
    expected = model.language_model(tokens).logits
    for empty in ({}, {"pixel_values": None}, {"pixel_values": torch.zeros(0, 3, 8, 8)}):
        torch.testing.assert_close(model(input_ids=tokens, **empty).logits, expected)


def test_own_projectors_and_callbacks_are_saved_by_name(tmp_path: Path) -> None:
    model = compose({"vision": ModalityEncoder(clip(), OwnProjector())})
    given = batch_of(model)
    assert model.num_features("vision", pixel_values=given["pixel_values"]) == [2, 2, 2]
    expected = output(model, given)
    model.save_pretrained(tmp_path)
    loaded = MultimodalModel.from_pretrained(tmp_path)
    torch.testing.assert_close(output(loaded, given), expected, rtol=0, atol=0)


def test_freeze_is_plain_requires_grad() -> None:
    model = build("two").model
    model.freeze(vision=True, vision_projector=False, language=True)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    wanted = ("encoders.vision.projector", "encoders.audio")
    assert trainable == {name for name, _ in model.named_parameters() if name.startswith(wanted)} - {
        "encoders.audio.model.embed_positions.weight"  # Whisper's own constant
    }
    assert not any(p.requires_grad for p in model.language_model.parameters())
    model.freeze(language=False)
    assert all(p.requires_grad for p in model.language_model.parameters())
    with pytest.raises(ConfigError, match=r"freeze\.visoin.*Did you mean 'vision'"):
        model.freeze(visoin=True)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}])
def test_generation_equals_that_of_each_sample(options: dict[str, Any]) -> None:
    model = build("two").model.eval()
    counts = {"vision": [2, 1, 0], "audio": [0, 1, 0]}
    given = batch(model, counts)
    prompt = {key: value for key, value in given.items() if key != "labels"}
    whole = model.generate(**prompt, max_new_tokens=5, do_sample=False, **options)
    assert torch.equal(whole[:, : prompt["input_ids"].shape[1]], prompt["input_ids"])
    for sample, (images, clips) in enumerate([(slice(0, 2), None), (slice(2, 3), slice(0, 1)), (None, None)]):
        alone = {"input_ids": prompt["input_ids"][sample : sample + 1]}
        alone |= {} if images is None else {"pixel_values": prompt["pixel_values"][images]}
        alone |= {} if clips is None else {"input_features": prompt["input_features"][clips]}
        one = model.generate(**alone, max_new_tokens=5, do_sample=False, **options)
        assert torch.equal(one[0], whole[sample][: len(one[0])])


def test_greedy_generation_is_what_forward_says() -> None:
    model = build("clip mlp").model.eval()
    given = batch_of(model)
    prompt = {key: value for key, value in given.items() if key not in ("labels", "attention_mask")}
    found = model.generate(**prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    tokens = prompt["input_ids"]
    for _ in range(3):
        logits = output(model, prompt | {"input_ids": tokens})[:, -1]
        logits[:, 5] = float("-inf")  # the end of a sequence, which min_new_tokens keeps out
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(found, tokens)


def test_features_of_each_item_are_to_be_had() -> None:
    model = build("two").model.eval()
    given = batch_of(model)
    features = model.get_image_features(pixel_values=given["pixel_values"]).pooler_output
    assert [tuple(item.shape) for item in features] == [(1, WIDTH)] * 3
    assert len(model.get_audio_features(input_features=given["input_features"]).pooler_output) == 1
    with pytest.raises(ConfigError, match=r"get_video_features: got 'video'.*but vision, audio"):
        model.get_video_features(pixel_values=given["pixel_values"])


def test_embeddings_are_those_of_the_language_model() -> None:
    model = compose({"vision": ModalityEncoder(clip())}, llama(tie_word_embeddings=True))
    model.resize_token_embeddings(80)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert len(model.get_input_embeddings().weight) == model.config.text_config.vocab_size == 80
    assert "language_model.lm_head.weight" in model.all_tied_weights_keys


def test_recomputation_and_a_copy_compute_the_same() -> None:
    model = build("clip mlp").model
    given = batch_of(model)
    model(**given).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    other = copy.deepcopy(model)
    other.zero_grad()
    other.activation_checkpointing_enable()
    other(**given, use_cache=False).loss.backward()
    for name, parameter in other.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name])


def test_parts_come_from_folders(tmp_path: Path) -> None:
    vision, language = clip(), gpt2()
    vision.save_pretrained(tmp_path / "vision")
    language.save_pretrained(tmp_path / "language")
    model = MultimodalModel.from_pretrained_parts(
        encoders={"vision": tmp_path / "vision", "audio": whisper()},
        language_model=tmp_path / "language",
        projectors={"vision": "linear"},
        token_ids={"vision": 1, "audio": 2},
    )
    for found, wanted in ((model.encoders["vision"].model, vision), (model.language_model, language)):
        for name, parameter in wanted.named_parameters():
            assert torch.equal(found.get_parameter(name), parameter)
    assert model.config.encoders["vision"]["projector"]["kind"] == "linear"
    with pytest.raises(ConfigError, match=r"projectors\.visio.*Use 'vision'"):
        MultimodalModel.from_pretrained_parts(
            encoders={"vision": vision}, language_model=language, projectors={"visio": "mlp"}
        )


def test_the_encoder_is_taken_out_of_a_model_around_it() -> None:
    parts = {"text_config": {**SMALL, "vocab_size": 16}, "vision_config": {**SMALL, "image_size": 8, "patch_size": 4}}
    assert type(ModalityEncoder(CLIPModel(CLIPConfig(**parts))).model).__name__ == "CLIPVisionModel"
    config = WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    assert type(ModalityEncoder(WhisperForConditionalGeneration(config)).model).__name__ == "WhisperEncoder"


def test_wrong_numbers_are_named() -> None:
    model = build("two").model
    given = batch_of(model)
    short = given | {"pixel_values": given["pixel_values"][:2]}
    with pytest.raises(ConfigError, match=r"input_ids\.vision.*\[2, 0, 1\].*2 features.*3 placeholder"):
        model(**short)
    del short["pixel_values"]
    with pytest.raises(ConfigError, match=r"0 features.*Pass the inputs of the vision encoder"):
        model(**short)


def test_where_the_host_does_not_wait_a_wrong_number_is_nan_and_then_an_error() -> None:
    places, tokens = Placeholders(), torch.tensor([[1, 1, 5]])
    embeds = torch.zeros(1, 3, 2)
    for rows in (1, 3):
        features = torch.ones(rows, 2)
        wrong, padded = places._compare_later("vision", 1, tokens == 1, embeds, features)
        assert wrong.masked_scatter((tokens == 1).unsqueeze(-1), padded)[0, 2].isnan().all()
        with pytest.raises(ConfigError, match=rf"{rows} features, and there are 2"):
            places.settle()
        places = copy.deepcopy(places)
    same, _ = places._compare_later("vision", 1, tokens == 1, embeds, torch.ones(2, 2))
    assert torch.equal(same, embeds)
    places.settle()
    assert not places._copied


def _lambda(model: MultimodalModel, path: Path) -> None:
    model.encoders["vision"].after = lambda items: items
    model.save_pretrained(path)


def _local_projector(model: MultimodalModel, path: Path) -> None:
    class Local(nn.Linear):
        pass

    compose({"vision": ModalityEncoder(clip(), Local(16, WIDTH))}).save_pretrained(path)


def _widths(model: MultimodalModel, path: Path) -> None:
    other = compose({"vision": ModalityEncoder(clip(), nn.Linear(16, 24))})
    other(**batch(other, {"vision": [1]}))


REFUSED: dict[str, tuple[Any, str]] = {
    "a callback without a name": (_lambda, r"encoders\.vision\.after.*at the top of a module"),
    "a projector without a name": (_local_projector, r"encoders\.vision: got 'Local'.*at the top of a module"),
    "a projector that cannot be built again": (
        lambda m, p: compose({"vision": ModalityEncoder(clip(), nn.Linear(16, WIDTH))}).save_pretrained(p),
        r"encoders\.vision\.projector.*Set self\.config",
    ),
    "a projector of another width": (_widths, "24 wide, and the language model's embeddings 16"),
    "heads that do not divide": (
        lambda m, p: compose({"vision": ModalityEncoder(clip(), {"kind": "query_former", "heads": 3})}),
        r"projector\.heads: got 3.*width of 16.*1, 2, 4, 8, 16",
    ),
    "an unknown projector": (lambda m, p: ModalityEncoder(clip(), "mpl"), "Did you mean 'mlp'"),
    "an unknown field": (lambda m, p: ModalityEncoder(clip(), {"dpeth": 2}), r"projector\.dpeth.*'depth'"),
    "a grid that does not divide": (
        lambda m, p: compose(
            {"vision": ModalityEncoder(clip(), ProjectorConfig(kind="pixel_shuffle", factor=3))}
        ).num_features("vision", pixel_values=torch.zeros(1, 3, 8, 8)),
        r"projector\.factor: got 'a grid of 2 x 2'",
    ),
    "a text model as an encoder": (lambda m, p: ModalityEncoder(gpt2()), "takes input_ids"),
    "no encoder": (lambda m, p: MultimodalModel(encoders={}, language_model=gpt2()), "at least one encoder"),
    "a bare encoder": (
        lambda m, p: MultimodalModel(encoders={"vision": clip()}, language_model=gpt2()),
        r"encoders\.vision: got 'CLIPVisionModel'.*Write ModalityEncoder",
    ),
    "a language model without a head": (
        lambda m, p: compose({"vision": ModalityEncoder(clip())}, GPT2Model(gpt2().config)),
        "with its head.*AutoModelForCausalLM",
    ),
    "an encoder-decoder": (
        lambda m, p: compose(
            {"vision": ModalityEncoder(clip())},
            T5ForConditionalGeneration(T5Config(d_model=16, d_kv=4, num_heads=2, d_ff=8, num_layers=1, vocab_size=8)),
        ),
        "must be causal",
    ),
    "one token for two modalities": (
        lambda m, p: MultimodalModel(
            encoders={"a": ModalityEncoder(clip()), "b": ModalityEncoder(clip())},
            language_model=gpt2(),
            token_ids={"a": 1, "b": 1},
        ),
        "placeholder token of its own",
    ),
    "a token of nothing": (
        lambda m, p: MultimodalModel(
            encoders={"vision": ModalityEncoder(clip())}, language_model=gpt2(), token_ids={"image": 1}
        ),
        r"token_ids\.image.*'vision'",
    ),
    "inputs without a token": (
        lambda m, p: MultimodalModel(encoders={"vision": ModalityEncoder(clip())}, language_model=gpt2())(
            input_ids=torch.ones(1, 4, dtype=torch.long), pixel_values=torch.zeros(1, 3, 8, 8)
        ),
        r"token_ids\.vision.*no token says where",
    ),
    "embeddings beside images": (
        lambda m, p: m(inputs_embeds=torch.zeros(1, 4, WIDTH), pixel_values=torch.zeros(1, 3, 8, 8)),
        "embeddings alone",
    ),
    "no modality of that name": (lambda m, p: m.num_features("visoin"), "Use 'vision'"),
    "a folder that names what it must not": (
        lambda m, p: MultimodalModel(_with_callback(m, "os:system")),
        "standard library",
    ),
}


def _with_callback(model: MultimodalModel, path: str) -> MultimodalConfig:
    fields = model.config.to_dict()
    fields["encoders"]["vision"]["after"] = path
    return MultimodalConfig.from_dict(fields)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    act, message = REFUSED[case]
    model = build("clip mlp").model
    with pytest.raises((ConfigError, CheckpointUntrustedError), match=message):
        act(model, tmp_path)


def test_token_ids_say_the_customary_names() -> None:
    config = build("two").model.config
    assert (config.image_token_id, config.audio_token_id, config.video_token_id) == (IDS["vision"], IDS["audio"], None)
