"""Placeholders, labels, padding and files of a processor; what it makes is what the model takes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel as QwenVision

from lightning_mm5d import ModalityEncoder, MultimodalModel, MultimodalProcessor
from lightning_mm5d.config.errors import ConfigError
from models.tiny_composed import composed, image, language_model, processor, processors, sound, talk
from models.tiny_tokenizers import CHATML, tokenizer


@pytest.fixture(scope="module")
def model() -> MultimodalModel:
    return composed().eval()


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_placeholder_tokens_get_embeddings_of_their_own() -> None:
    model = composed()
    made = processor(model)
    tokens = len(made.tokenizer)
    assert made.token_ids == model.config.token_ids == {"vision": tokens - 2, "audio": tokens - 1}
    assert model.get_input_embeddings().weight.shape[0] == model.get_output_embeddings().weight.shape[0] == tokens
    processor(model)  # again: nothing grows
    assert model.get_input_embeddings().weight.shape[0] == tokens


def test_an_item_has_as_many_placeholders_as_features(model: MultimodalModel) -> None:
    made = processor(model)
    rows = [talk(image(0), "what?", image(1), sound(0)), talk("no items"), talk(sound(1, 0.5), answer="")]
    batch = made.batch([made.encode(row) for row in rows])
    vision, audio = (batch["input_ids"] == made.token_ids[name] for name in ("vision", "audio"))
    assert vision.sum(1).tolist() == [8, 0, 0]
    assert audio.sum(1).tolist() == [10, 0, 25]
    assert batch["vision_items"].tolist() == [2, 0, 0]
    assert batch["audio_items"].tolist() == [1, 0, 1]
    assert model(**batch).loss.isfinite()
    labels = [row[row >= 0] for row in batch["labels"]]
    assert [made.decode(row) for row in labels] == ["a cat<|im_end|>", "a cat<|im_end|>", "<|im_end|>"]
    assert not torch.isin(batch["labels"], torch.tensor(list(made.token_ids.values()))).any()


def test_an_image_in_a_turn_of_the_assistant_is_not_learned(model: MultimodalModel) -> None:
    made = processor(model)
    answer = [{"type": "text", "text": "see "}, {"type": "image", "image": image(0)}, {"type": "text", "text": "here"}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    batch = made.apply_chat_template(messages, labels=True)
    learned = batch["labels"][0][batch["labels"][0] >= 0]
    assert made.decode(learned) == "see here<|im_end|>"


def test_padding_does_not_change_what_the_model_says(model: MultimodalModel) -> None:
    made = processor(model)
    samples = [made.encode(row) for row in (talk(image(0), "what is this?"), talk("a"))]
    alone = model(**made.batch(samples[1:])).logits[0]
    right = model(**made.batch(samples)).logits[1, : len(samples[1])]
    torch.testing.assert_close(right, alone, atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match="left or right"):
        made.batch(samples, padding_side="middle")


def test_texts_with_placeholders_generate_as_alone(model: MultimodalModel) -> None:
    made = processor(model)
    texts = ["<|vision|> what is this", "<|audio|> a <|vision|>", "and"]
    vision, audio = [[image(0)], [image(1)], []], [None, [sound(0)], None]
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
    batch = made(text=texts, vision=vision, audio=audio, return_tensors="pt")
    assert same(made(text=texts, vision=[image(0), image(1)], audio=[sound(0)]), batch)  # one for each placeholder
    together = model.generate(**batch, **options)[:, -4:]
    for index, text in enumerate(texts):
        alone = made(text=text, vision=vision[index], audio=audio[index])
        assert torch.equal(model.generate(**alone, **options)[0, -4:], together[index])
    assert made.batch_decode(together) == [made.decode(row) for row in together]


def test_prompts_of_conversations_end_where_the_assistant_speaks(model: MultimodalModel) -> None:
    made = processor(model)
    messages = talk(image(0), "what?")["messages"][:1]
    batch = made.apply_chat_template([messages, messages], add_generation_prompt=True)
    assert made.decode(batch["input_ids"][1]).endswith("what?<|im_end|>\n<|im_start|>assistant\n")
    assert "labels" not in batch
    text = made.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert torch.equal(made(text=text, vision=[image(0)])["input_ids"][0], batch["input_ids"][0])


def test_a_text_that_begins_as_the_tokenizer_has_it_begins_once(model: MultimodalModel) -> None:
    made = MultimodalProcessor(tokenizer(begins=True), processors(), model)
    for text in ("a", "<s>a"):
        assert made(text=text)["input_ids"][0].tolist().count(made.tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("text", "items", "said"),
    [
        ("<|vision|><|vision|>", {"vision": ["one"]}, "1 items of vision for 2 placeholders"),
        ("a", {"vision": ["one"]}, "1 items of vision for 0 placeholders"),
        ("a", {"depth": ["one"]}, "no modality"),
        (["a", "<|vision|>"], {"vision": [["one"]]}, "2 texts"),
        ("<|vision|>", {"vision": ["missing.png"]}, "missing.png"),
    ],
)
def test_items_that_do_not_fit_are_refused(model: MultimodalModel, text: Any, items: Any, said: str) -> None:
    def given(value: Any) -> Any:
        return [given(part) for part in value] if isinstance(value, list) else image(0) if value == "one" else value

    with pytest.raises(ConfigError, match=said):
        processor(model)(text=text, **{name: given(value) for name, value in items.items()})


@pytest.mark.parametrize(
    ("name", "item", "said"),
    [
        ("audio", np.zeros((2, 4000), np.float32), "one row of samples"),
        ("audio", np.zeros(0, np.float32), "one row of samples"),
        ("audio", np.zeros(16001, np.float32), "beyond 16000 samples"),
        ("vision", np.zeros((9, 9), np.uint8), "CLIPImageProcessorPil says"),
    ],
)
def test_items_that_a_processor_would_misread_are_refused(
    model: MultimodalModel, name: str, item: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        processor(model)(text=f"<|{name}|>", **{name: [item]})


def test_a_sound_may_tell_its_sampling_rate(model: MultimodalModel) -> None:
    made = processor(model)
    given = {"array": sound(0, 0.1), "sampling_rate": 8000}  # 1600 samples last 0.2 seconds
    assert made(text="<|audio|>", audio=[given])["input_ids"].shape == (1, 10)


def test_parts_that_do_not_fit_are_refused(model: MultimodalModel) -> None:
    for some, said in (({"vision": processors()["vision"]}, "audio"), ({**processors(), "depth": len}, "depth")):
        with pytest.raises(ConfigError, match=said):
            MultimodalProcessor(tokenizer(CHATML), some, model)
    with pytest.raises(ConfigError, match=r"tokens: got \['depth'\].*Add or remove 'depth'"):
        MultimodalProcessor(tokenizer(CHATML), processors(), model, tokens={"depth": "<|depth|>"})
    with pytest.raises(ConfigError, match=r"processors: got \[\].*Add or remove 'audio'"):
        MultimodalProcessor(tokenizer(CHATML), {}, model, tokens=dict.fromkeys(processors(), "<|item|>"))
    with pytest.raises(ConfigError, match="MultimodalModel"):
        MultimodalProcessor(tokenizer(CHATML), processors(), language_model())
    same_token = dict.fromkeys(processors(), "<|item|>")
    with pytest.raises(ConfigError, match="of its own"):
        MultimodalProcessor(tokenizer(CHATML), processors(), model, tokens=same_token)
    made = MultimodalProcessor(tokenizer(CHATML), {**processors(), "vision": lambda items: {"x": [1]}}, model)
    with pytest.raises(ConfigError, match="takes none"):
        made(text="<|vision|>", vision=[image(0)])


def test_a_saved_processor_makes_the_same_batches_without_the_model(tmp_path: Path) -> None:
    model = composed(vision="pixel_shuffle")
    made = MultimodalProcessor(
        tokenizer(), processors(), model, tokens={"vision": "<image>", "audio": "<sound>"}, frames=3
    )
    row = talk(image(0), "what <image>?", sound(0))
    expected = made.batch([made.encode(row)])
    assert int((expected["input_ids"] == made.token_ids["vision"]).sum()) == 1  # 2 x 2 patches shuffled into one
    model.save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    for loaded in (
        MultimodalProcessor.from_pretrained(tmp_path),
        MultimodalProcessor.from_pretrained(tmp_path, MultimodalModel.from_pretrained(tmp_path)),
        pickle.loads(pickle.dumps(made)),
    ):
        assert same(loaded.batch([loaded.encode(row)]), expected)
        assert (loaded.frames, loaded.tokens) == (3, made.tokens)
    with pytest.raises(ConfigError, match=r"multimodal_processor\.json"):
        MultimodalProcessor.from_pretrained(tmp_path / "other")


def test_functions_are_passed_again_when_loading(tmp_path: Path) -> None:
    model = composed()
    made = MultimodalProcessor(tokenizer(CHATML), {**processors(), "vision": _pixels}, model)
    expected = made(text="<|vision|>", vision=[np.ones((8, 8, 3))])
    made.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a function, which is not saved"):
        MultimodalProcessor.from_pretrained(tmp_path)
    loaded = MultimodalProcessor.from_pretrained(tmp_path, processors={"vision": _pixels})
    assert same(loaded(text="<|vision|>", vision=[np.ones((8, 8, 3))]), expected)


def _pixels(items: list[Any]) -> dict[str, Any]:
    return {"pixel_values": np.stack(items).transpose(0, 3, 1, 2).astype(np.float32)}


def test_frames_of_a_video_are_one_item() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = hf.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    encoders = {name: ModalityEncoder(hf.CLIPVisionModel(config)) for name in ("vision", "video")}
    model = MultimodalModel(encoders=encoders, language_model=language_model()).eval()
    images = processors()["vision"]
    made = MultimodalProcessor(tokenizer(CHATML), {"vision": images, "video": images}, model, frames=4)
    short, long = [image(n) for n in range(2)], [image(n) for n in range(3)]
    batch = made(text=["<|video|>", "<|video|><|vision|>"], video=[[short], [long]], vision=[None, [image(9)]])
    assert (batch["input_ids"] == made.token_ids["video"]).sum(1).tolist() == [8, 12]
    assert batch["video_items"].tolist() == [1, 1]
    alone = made(text="<|video|>", video=[short])
    logits = model(**batch).logits[0, -8:]
    torch.testing.assert_close(logits, model(**alone).logits[0], atol=1e-5, rtol=0)


def test_patches_of_images_of_unlike_sizes_lie_in_a_row() -> None:
    sizes = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}
    vision = QwenVision(hf.AutoConfig.for_model("qwen2_vl", vision_config=sizes).vision_config)
    model = MultimodalModel(encoders={"vision": ModalityEncoder(vision, "linear")}, language_model=language_model())
    images = hf.Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112})
    made = MultimodalProcessor(tokenizer(CHATML), {"vision": images}, model)
    wide = image(0).resize((84, 28))
    batch = made(text=["<|vision|>", "<|vision|>"], vision=[[wide], [image(1).resize((28, 28))]])
    assert (batch["input_ids"] == made.token_ids["vision"]).sum(1).tolist() == [3, 1]
    assert batch["image_grid_thw"].tolist() == [[1, 2, 6], [1, 2, 2]]
    assert model(**batch).logits.isfinite().all()
