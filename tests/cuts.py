"""Tiny models, how they are cut, and what trains in them, for the tests of partitions and plans."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_mm5d.config.groups import PipelineTemplate
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.partition import Partition, partition
from zoo import CASES
from zoo.case import TinyModule
from zoo.text import LLAMA

LAYER = 7744  # elements of a layer of the zoo's Llama, its norms included
HEAD = 64 * 32


def llama(*, tied: bool = False, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return TinyModule(LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes}, tie_word_embeddings=tied)))


def llava() -> Any:
    return CASES["llava"].make_module()


def cut(module: nn.Module, **modalities: Modality) -> Partition:
    return partition(module, modalities or {"language": Modality()})


def train_only(module: nn.Module, *words: str) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(any(word in name for word in words))


def by_offsets(*offsets: int) -> Modality:
    return Modality(pipeline={"pipeline_template": PipelineTemplate(offsets=list(offsets))})
