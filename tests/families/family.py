"""The families of the table: multimodal ones by transformers' public mappings, and those of Shardformer's list.

A family is a model type and the class that trains it. Its model is built from a shrunk configuration with random
weights, perturbed after the model's own initialisation so that no gradient hides after a zero, and fed by `feeds`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import lightning as L
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.models.auto import configuration_auto, modeling_auto

from .batches import BATCHES
from .corrections import AFTER, CORRECTIONS, FIXED, MODEL, MORE
from .feeds import Batch, feed, loss_of, suits
from .shrunk import shrunk

MAPPINGS = {
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "image and text to text",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES": "audio and text to text",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": "speech to text",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES": "dual encoder",
    "MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING_NAMES": "visual questions",
    "MODEL_FOR_DOCUMENT_QUESTION_ANSWERING_MAPPING_NAMES": "documents",
    "MODEL_FOR_RETRIEVAL_MAPPING_NAMES": "retrieval",
    "MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING_NAMES": "detection by text",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES": "text to speech",
    "MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES": "text to speech",
}
"""Mappings whose models have several modalities, and what they do; the first that names a model type counts."""

TEXT = {"input_ids", "decoder_input_ids"}
OTHER = {"pixel_values", "pixel_values_videos", "input_features", "input_values", "bbox"}

SHARDFORMER = {
    "llama": "LlamaForCausalLM",
    "opt": "OPTForCausalLM",
    "bloom": "BloomForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "bert": "BertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "sam": "SamModel",
    "falcon": "FalconForCausalLM",
    "roberta": "RobertaForMaskedLM",
    "albert": "AlbertForMaskedLM",
    "ernie": "ErnieForMaskedLM",
    "gpt_neo": "GPTNeoForCausalLM",
    "gptj": "GPTJForCausalLM",
    "beit": "BeitForImageClassification",
    "swin": "SwinForImageClassification",
    "swinv2": "Swinv2ForImageClassification",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
"""Families of text and vision alone; Whisper and BLIP-2 of the same list are multimodal."""


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        name: transformers' model type.
        kind: what the model does.
        model: name of the class that trains it.
    """

    name: str
    kind: str
    model: str

    @property
    def model_class(self) -> Any:
        return getattr(hf, self.model)

    def config(self) -> Any:
        known: Any = self.model_class.config_class or configuration_auto.CONFIG_MAPPING[self.name]
        config = AFTER.get(self.name, lambda one: one)(shrunk(known(), CORRECTIONS.get(self.name)))
        config._experts_implementation = "eager"  # the others know no float64 on the CPU
        for part in vars(config).values():
            if isinstance(part, hf.PreTrainedConfig):
                part._experts_implementation = "eager"
        return config

    def model_of(self, seed: int = 0) -> nn.Module:
        """The model in float64 and in train mode; equal seeds give equal parameters."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            model = self.model_class(self.config()).double().train()
            MODEL.get(self.name, id)(model)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model

    def check_size(self, most: int) -> None:
        """Raise where the shrunk model has more than `most` parameters."""
        with torch.device("meta"):
            count = sum(p.numel() for p in self.model_class(self.config()).parameters())
        if count > most:
            raise ValueError(f"its configuration shrinks to {count:,} parameters")

    def fixed(self) -> Batch:
        """Arguments of every call."""
        known = inspect.signature(self.model_class.forward).parameters
        found: Batch = {"return_loss": True} if "return_loss" in known else {}
        if "past_key_values" in known or "use_cache" in known:
            found["use_cache"] = False
        return found | FIXED.get(self.name, {})

    def module(self) -> L.LightningModule:
        return FamilyModule(self.model_of(), **self.fixed())

    def batches(self, count: int, samples: int) -> list[Batch]:
        """Batches of `samples`, from seeds 0, 1, ..."""
        found, model = [], self.model_of()
        for seed in range(count):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                found.append(self.batch_of(model, samples))
        return found

    def batch_of(self, model: nn.Module, samples: int) -> Batch:
        """A batch that is written down, or one that is found."""
        if self.name not in BATCHES:
            return feed(model, self.fixed(), samples, MORE.get(self.name, dict))
        batch = BATCHES[self.name](samples)
        if reason := suits(model, batch, self.fixed()):
            raise ValueError(f"no batch suits: {reason}")
        return batch


class FamilyModule(L.LightningModule):
    """The ordinary Lightning module around a model."""

    def __init__(self, model: nn.Module, **fixed: Any) -> None:
        super().__init__()
        self.model, self.fixed = model, fixed
        self.said: list[list[int]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss_of(self.model(**batch, **self.fixed))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        inputs = {key: value for key, value in batch.items() if "labels" not in key}
        options = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "suppress_tokens": list(range(16))}
        self.said += self.model.generate(**inputs, **options).tolist()  # type: ignore[operator]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


@lru_cache
def families() -> dict[str, Family]:
    """All families by name, multimodal ones first."""
    found: dict[str, Family] = {}
    for mapping, kind in MAPPINGS.items():
        for name, classes in getattr(modeling_auto, mapping).items():
            model = classes if isinstance(classes, str) else classes[0]
            found.setdefault(name, Family(name, kind, model))
    for name, classes in modeling_auto.MODEL_MAPPING_NAMES.items():
        if name not in found and name not in SHARDFORMER:
            model = classes if isinstance(classes, str) else classes[0]
            if _takes_text_and_more(model):
                found[name] = Family(name, "model of several inputs", model)
    found |= {name: Family(name, "of one modality", model) for name, model in SHARDFORMER.items()}
    return found


def _takes_text_and_more(model: str) -> bool:
    try:
        known = set(inspect.signature(getattr(hf, model).forward).parameters)
    except (AttributeError, ImportError):  # not public, or another library is missing
        return False
    return bool(known & TEXT) and bool(known & OTHER)
