"""`from_pretrained` without memory gives what transformers' own gives, bit by bit, and refuses what it cannot keep."""

from __future__ import annotations

import copy
import json
import logging
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, BertForMaskedLM, BertModel, LlamaForCausalLM, LlamaModel

from lightning_mm5d import CheckpointCorruptError, CheckpointUntrustedError, ConfigError, from_pretrained
from lightning_mm5d.features.deferred_init.pretrained import PretrainedSource, is_streaming
from lightning_mm5d.storage.tensor_file import TensorFile

from .hugging_face import EXPERTS, SMALL, assert_same, bert, deferred, llama, rewritten


def test_shards_and_an_index_are_read(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert "lm_head.weight" in assert_same(LlamaForCausalLM, tmp_path)


@pytest.mark.parametrize("dtype", [None, "auto", "float64", torch.float16], ids=str)
def test_the_dtype_is_that_of_transformers(tmp_path: Path, dtype: Any) -> None:
    llama().bfloat16().save_pretrained(tmp_path)
    assert_same(
        AutoModelForCausalLM, tmp_path, attn_implementation="eager", **({} if dtype is None else {"dtype": dtype})
    )


def test_modules_kept_in_float32_are(tmp_path: Path) -> None:
    own = {name: SMALL[name] for name in ("vocab_size",)}
    config = transformers.T5Config(
        **own, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, feed_forward_proj="gated-gelu"
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert_same(transformers.T5ForConditionalGeneration, tmp_path, dtype=torch.float16)


def test_a_head_that_is_not_in_the_files_is_initialised_and_listed(tmp_path: Path, caplog: Any) -> None:
    llama().save_pretrained(tmp_path)
    logging.getLogger("transformers").propagate = True
    try:
        with caplog.at_level(logging.WARNING, logger="transformers"):  # a command of another test may have raised it
            stored = assert_same(transformers.LlamaForSequenceClassification, tmp_path, num_labels=3)
    finally:
        logging.getLogger("transformers").propagate = False
    assert "score.weight" not in stored
    messages = [record.getMessage() for record in caplog.records if "LOAD REPORT" in record.getMessage()]
    assert len(messages) % 2 == 0  # of both ways to load
    (report,) = set(messages)
    assert "score.weight" in report
    assert "lm_head.weight" in report


def test_prefixes_of_base_models_come_and_go(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "head")
    assert_same(LlamaModel, tmp_path / "head")
    LlamaModel(llama().config).save_pretrained(tmp_path / "base")
    assert_same(LlamaForCausalLM, tmp_path / "base")


def test_old_names_are_renamed(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def rename(name: str) -> str:
        for new, former in old.items():
            name = name.replace(new, former)
        return name

    rewritten(tmp_path, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    for cls in (BertForMaskedLM, BertModel):
        assert any("LayerNorm.weight" in name for name in assert_same(cls, tmp_path))


def test_a_users_own_renaming_is_applied(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    rewritten(tmp_path, lambda tensors: {name.replace("mlp", "feed"): value for name, value in tensors.items()})
    assert_same(LlamaForCausalLM, tmp_path, key_mapping={r"\.feed\.": ".mlp."})


def test_experts_are_stacked_from_their_files_and_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.Qwen3MoeConfig(**EXPERTS, num_experts=4, num_experts_per_tok=2, head_dim=8)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path, max_shard_size="10KB")
    assert_same(transformers.Qwen3MoeForCausalLM, tmp_path)
    _, weights = deferred(lambda: from_pretrained(transformers.Qwen3MoeForCausalLM, tmp_path))
    source = PretrainedSource(weights.stored)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    shape, sizes, read_at = source.shape(name), list[int](), TensorFile.read_at

    def noted(file: TensorFile, descriptor: int | None, memory: memoryview, offset: int) -> None:
        sizes.append(len(memory))
        read_at(file, descriptor, memory, offset)

    monkeypatch.setattr(TensorFile, "read_at", noted)
    part = source.read(name, [(1, 3), *((0, size) for size in shape[1:])])
    assert sum(sizes) == part.nbytes == 2 * shape[1] * shape[2] * 4


def test_tied_weights_are_tied_whatever_is_stored(tmp_path: Path) -> None:
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    embedding = "model.embed_tokens.weight"
    assert {"lm_head.weight", embedding} <= {*assert_same(LlamaForCausalLM, tmp_path)}
    rewritten(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors[embedding]})
    assert_same(LlamaForCausalLM, tmp_path)  # equal twins
    rewritten(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors[embedding] + 1})
    assert_same(LlamaForCausalLM, tmp_path)  # unequal ones are not tied
    rewritten(tmp_path, lambda tensors: {name: value for name, value in tensors.items() if name != embedding})
    assert_same(LlamaForCausalLM, tmp_path)  # the head alone


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of peft
def test_what_the_user_does_with_the_model_afterwards_counts(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)

    def resized(model: Any) -> Any:
        model.resize_token_embeddings(70)  # the new rows are drawn around the mean of the stored ones
        return model

    def frozen(model: Any) -> Any:
        return model.model.requires_grad_(False)

    def adapted(model: Any) -> Any:
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    assert "lm_head.weight" not in assert_same(LlamaForCausalLM, tmp_path, resized)
    assert assert_same(LlamaForCausalLM, tmp_path, lambda model: model.to(torch.bfloat16))
    assert_same(LlamaForCausalLM, tmp_path, frozen)
    assert "base_model.model.lm_head.weight" in assert_same(LlamaForCausalLM, tmp_path, adapted)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # of peft
def test_adapters_are_read_beside_their_model(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    llama().save_pretrained(base)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(LlamaForCausalLM.from_pretrained(base), config).save_pretrained(adapter)

    def adapted(model: Any) -> Any:
        model.load_adapter(str(adapter))
        return model

    for stored in (assert_same(LlamaForCausalLM, base, adapted), assert_same(AutoModelForCausalLM, adapter)):
        assert {"lm_head.weight", "model.layers.0.self_attn.q_proj.lora_A.default.weight"} <= {*stored}
    assert_same(LlamaForCausalLM, base, lambda model: peft.PeftModel.from_pretrained(model, adapter, is_trainable=True))


def test_models_of_several_folders_have_their_own_weights(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "encoder")
    llama().save_pretrained(tmp_path / "decoder")

    class Pair(nn.Module):
        @classmethod
        def from_pretrained(cls, folder: Path) -> Pair:
            return cls(folder)

        def __init__(self, folder: Path) -> None:
            super().__init__()
            self.encoder = from_pretrained(BertModel, folder / "encoder")
            self.projector = nn.Linear(16, 16)
            self.decoder = from_pretrained(LlamaForCausalLM, folder / "decoder", dtype=torch.bfloat16)
            self.decoder.lm_head.weight.data.mul_(2)
            self.copy = copy.deepcopy(self.decoder.model.norm)

    stored = assert_same(Pair, tmp_path)
    assert "decoder.model.norm.weight" in stored
    assert not {"projector.weight", "decoder.lm_head.weight"} & {*stored}


def test_sizes_that_differ_are_refused_unless_ignored(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    stored = assert_same(LlamaForCausalLM, tmp_path, vocab_size=80, ignore_mismatched_sizes=True)
    assert "lm_head.weight" not in stored
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        deferred(lambda: from_pretrained(LlamaForCausalLM, tmp_path, vocab_size=80))


def test_a_model_of_the_hub_is_found_in_the_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    llama().save_pretrained(tmp_path / "blobs", max_shard_size="20KB")
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(snapshot.name)
    name: Any = "someone/tiny"
    assert assert_same(LlamaForCausalLM, name, cache_dir=str(tmp_path), local_files_only=True)


def test_the_plain_call_in_configure_model_leaves_weights_in_their_files(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    module, weights = deferred(lambda: AutoModel.from_pretrained(tmp_path))
    assert all(tensor.is_meta for tensor in module.parameters())
    assert "layers.0.mlp.up_proj.weight" in weights.stored


def test_transformers_may_be_imported_while_the_model_is_built(tmp_path: Path, monkeypatch: Any) -> None:
    llama().save_pretrained(tmp_path)

    def build() -> nn.Module:
        assert not is_streaming()
        monkeypatch.undo()
        return LlamaForCausalLM.from_pretrained(tmp_path)

    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    module, _ = deferred(build)
    assert all(tensor.is_meta for tensor in module.parameters())
    assert not is_streaming()


def test_elsewhere_it_is_the_plain_call(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    assert not is_streaming()
    module = from_pretrained(LlamaForCausalLM, tmp_path, state_dict=None, device_map=None)
    assert not any(tensor.is_meta for tensor in module.parameters())


@pytest.mark.parametrize(
    "option", [{"device_map": "auto"}, {"tp_plan": "auto"}, {"quantization_config": {"load_in_8bit": True}}], ids=str
)
def test_settings_that_place_or_change_weights_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"^from_pretrained\.{next(iter(option))}: got"):
        deferred(lambda: from_pretrained(LlamaForCausalLM, tmp_path, **option))


def test_a_state_dict_is_refused_also_by_the_plain_call() -> None:
    model = llama()
    with pytest.raises(ConfigError, match=r"from_pretrained\.state_dict"):
        deferred(lambda: LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict()))


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointUntrustedError, match=r"pytorch_model\.bin.*save_pretrained"):
        deferred(lambda: from_pretrained(LlamaForCausalLM, tmp_path))


class TestDamage:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        llama().save_pretrained(tmp_path, max_shard_size="10KB")
        return tmp_path

    def load(self, folder: Path) -> nn.Module:
        return deferred(lambda: from_pretrained(LlamaForCausalLM, folder))[0]

    def test_a_missing_file_is_named(self, folder: Path) -> None:
        lost = sorted(folder.glob("model-*.safetensors"))[1]
        lost.unlink()
        with pytest.raises(CheckpointCorruptError, match=lost.name):
            self.load(folder)

    def test_a_truncated_file_is_named(self, folder: Path) -> None:
        file = sorted(folder.glob("model-*.safetensors"))[1]
        file.write_bytes(file.read_bytes()[:-8])
        with pytest.raises(CheckpointCorruptError, match=file.name):
            self.load(folder)

    def test_a_tensor_that_its_file_lacks_is_named(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        files = json.loads(index.read_text())
        files["weight_map"]["lm_head.weight"] = files["weight_map"]["model.embed_tokens.weight"]
        index.write_text(json.dumps(files))
        with pytest.raises(CheckpointCorruptError, match=r"lm_head\.weight"):
            self.load(folder)

    def test_a_broken_index_is_named(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        index.write_text(index.read_text()[:-20])
        with pytest.raises(CheckpointCorruptError, match="index"):
            self.load(folder)

    def test_an_index_cannot_name_files_of_other_folders(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        files = json.loads(index.read_text())
        files["weight_map"]["lm_head.weight"] = "../elsewhere.safetensors"
        index.write_text(json.dumps(files))
        with pytest.raises(CheckpointUntrustedError, match=r"\.\./elsewhere\.safetensors"):
            self.load(folder)
