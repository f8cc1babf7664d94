"""A multimodal model composed from any encoders and any causal language model.

Features of items replace the embeddings of placeholder tokens, in order; the language model does the rest, its loss
included. It is an ordinary model of transformers: saved, loaded, generated with and adapted as others are.

Shapes: B samples, S tokens, E width of the language model's embeddings, T rows of all items of a modality.

Puts features at the placeholder tokens of their modality, and makes sure that there are as many of both.

On a CPU the numbers are compared at once. Elsewhere reading them would make the host wait for the device, so they are
copied aside and compared when the next batch comes. Until then the result of a wrong number is NaN, never a number.

Shapes: B samples, S tokens, E width of the embeddings, T rows of features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.models.modality_encoder import (
    CALLBACKS,
    ModalityEncoder,
    batch_keys,
    built_projector,
    feature_counts,
)
from lightning_mm5d.models.multimodal_config import (
    CUSTOMARY_NAMES,
    MultimodalConfig,
    built_encoder,
    built_language_model,
    from_import_path,
    import_path,
    without_own_code,
)
from lightning_mm5d.models.packing import packed_options

Items = tuple[Sequence[int], Sequence[int] | None]
"""The rows of each item, and how many items each sample has, or None."""


@dataclass(frozen=True)
class _Copied:
    """Placeholders of each sample, on their way to the host.

    Attributes:
        name: of the modality.
        token: id of its placeholder.
        counts: of each sample. (B,)
        rows: T.
        done: what tells whether the copy is there; None where it is.
    """

    name: str
    token: int
    counts: Tensor
    rows: int
    done: Any

    def settled(self) -> bool:
        """Whether the copy is there; raises ConfigError where it is, and differs."""
        if self.done is not None and not self.done.query():
            return False
        _compare(self.name, self.token, self.counts.tolist(), self.rows)
        return True


@dataclass
class Placeholders:
    """Places features, and keeps the numbers that have not been compared yet."""

    _copied: list[_Copied] = field(default_factory=list)

    def settle(self) -> None:
        """Compare the numbers of earlier batches that have come to the host.

        Raises:
            ConfigError: a batch had another number of features than of placeholders.
        """
        self._copied = [copied for copied in self._copied if not copied.settled()]

    def place(
        self,
        name: str,
        token: int,
        input_ids: Tensor,
        embeds: Tensor,
        features: Tensor | None,
        items: Callable[[], Items] | None = None,
    ) -> Tensor:
        """Return `embeds` with the rows of `features` at the placeholders, in order.

        Args:
            name: of the modality.
            token: id of its placeholder.
            input_ids: (B, S).
            embeds: (B, S, E).
            features: (T, E), or None where the batch has no items.
            items: tells the rows of each item and, where it is known, how many items each sample has. Asked on a CPU
                alone.

        Raises:
            ConfigError: their number or their width differs, or features of an item would come to another sample.
        """
        mask = input_ids == token
        rows = 0 if features is None else len(features)
        if features is not None and features.shape[-1] != embeds.shape[-1]:
            rule = f"Its features are {features.shape[-1]} wide, and the language model's embeddings {embeds.shape[-1]}"
            raise ConfigError(f"encoders.{name}.projector", features.shape[-1], rule, "Use a projector between them")
        if mask.is_meta or torch.compiler.is_compiling():
            pass
        elif mask.device.type == "cpu":
            counts = mask.sum(dim=1).tolist()
            _compare(name, token, counts, rows)
            if items is not None and len(counts) > 1:
                _compare_samples(name, token, counts, *items())
        else:
            embeds, features = self._compare_later(name, token, mask, embeds, features)
        return embeds if features is None else embeds.masked_scatter(mask.unsqueeze(-1), features.to(embeds.dtype))

    def _compare_later(
        self, name: str, token: int, mask: Tensor, embeds: Tensor, features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Copy the numbers aside; where they differ, all embeddings are NaN, and there are features enough."""
        counts, rows = mask.sum(dim=1), 0 if features is None else len(features)
        wrong = torch.where(counts.sum() == rows, 0.0, float("nan")).to(embeds.dtype)
        if features is not None:
            features = torch.cat([features, features.new_zeros(max(0, mask.numel() - rows), features.shape[-1])])
        done = torch.Event(mask.device.type) if mask.device.type != "cpu" else None
        self._copied.append(_Copied(name, token, counts.to("cpu", non_blocking=True), rows, done))
        if done is not None:
            done.record()
        return embeds + wrong, features

    def __reduce__(self) -> tuple[type, tuple[()]]:  # copies and pickles have nothing to compare
        return Placeholders, ()


def _compare(name: str, token: int, counts: list[int], rows: int) -> None:
    if sum(counts) != rows:
        rule = f"Its encoder gave {rows} features, and there are {sum(counts)} placeholder tokens of id {token}"
        fix = "Write as many tokens for each item as `num_features` tells, as MultimodalProcessor does"
        if rows == 0:
            fix = f"Pass the inputs of the {name} encoder, or leave its tokens out"
        raise ConfigError(f"input_ids.{name}", f"{counts} tokens in the samples", rule, fix)


def _compare_samples(
    name: str, token: int, counts: Sequence[int], lengths: Sequence[int], items: Sequence[int] | None
) -> None:
    """Refuse samples that would get features of each other's items, though all numbers add up."""
    ends, places = [0, *accumulate(lengths)], list(accumulate(counts))
    rule = f"{name}_items says {items} items for the samples, and the items have {list(lengths)} features"
    if items is None:
        rule = f"The items have {list(lengths)} features, so some of an item would come to another sample"
        wrong = [sample for sample, place in enumerate(places) if place not in ends]
    elif len(items) != len(counts) or sum(items) != len(lengths):
        wrong = [0]
    else:
        last = [ends[end] for end in accumulate(items)]
        wrong = [sample for sample, place in enumerate(places) if place != last[sample]]
    if wrong:
        fix = "Order the items as their samples are, and write as many tokens in each as `num_features` tells"
        got = f"{counts[wrong[0]]} tokens of id {token} in sample {wrong[0]}"
        raise ConfigError(f"input_ids.{name}", got, rule, fix)


class MultimodalModel(PreTrainedModel, GenerationMixin):
    """Encoders whose features take the place of placeholder tokens of a causal language model.

    Args:
        config: of a model to be built anew; transformers' ``from_pretrained`` passes it. Excludes the others.
        encoders: for each modality, by a name of one's own, its encoder.
        language_model: a causal language model.
        token_ids: for each modality the id of its placeholder token; a processor can set them later.

    Raises:
        ConfigError: parts that do not fit together.
    """

    config_class = MultimodalConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    input_modalities = ["text", "image", "audio", "video"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(
        self,
        config: MultimodalConfig | None = None,
        *,
        encoders: Mapping[str, ModalityEncoder] | None = None,
        language_model: Any = None,
        token_ids: Mapping[str, int] | None = None,
    ) -> None:
        composed = config is None
        if composed:
            given = _checked(encoders, language_model)
            config = _config_of(given, language_model, token_ids)
        elif not isinstance(config, MultimodalConfig):
            rule = "The first argument is a MultimodalConfig"
            fix = "Write encoders=... and language_model=..."
            raise ConfigError("MultimodalModel", type(config).__name__, rule, fix)
        else:
            given = {name: _built(name, entry) for name, entry in config.encoders.items()}
            language_model = built_language_model(config)
        super().__init__(config)
        self._is_composed = composed
        embedding = language_model.get_input_embeddings().weight
        for encoder in given.values():
            encoder.fit_to(embedding.shape[1], embedding if composed else None)
        self.encoders = nn.ModuleDict(given)
        self.language_model = language_model
        for name, encoder in given.items():  # one object, so that what transformers notes in a part's is saved
            config.encoders[name]["model"] = encoder.model.config
        config.text_config = language_model.config
        self.encoder_inputs = batch_keys(config)
        self._placeholders = Placeholders()
        self.post_init()

    def class_for_export(self) -> str | None:
        """Return the dotted name of this class, or None where a part of the model has a class outside transformers."""
        known = without_own_code(self.config.to_dict()) is not None
        return f"{MultimodalModel.__module__}.{MultimodalModel.__qualname__}" if known else None

    def init_weights(self) -> None:
        """Initialise a model that is built from its configuration; composed parts are as they were."""
        if not self._is_composed:
            super().init_weights()

    def _init_weights(self, module: nn.Module) -> None:
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    def get_input_embeddings(self) -> nn.Module:
        """Return the language model's."""
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the language model's."""
        self.language_model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the language model's head."""
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the language model's head."""
        self.language_model.set_output_embeddings(value)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Resize the language model's embeddings, for placeholder tokens that were added to its tokenizer."""
        return self.language_model.resize_token_embeddings(*args, **kwargs)

    @classmethod
    def from_pretrained_parts(
        cls,
        *,
        encoders: Mapping[str, Any],
        language_model: Any,
        projectors: Mapping[str, Any] | None = None,
        token_ids: Mapping[str, int] | None = None,
        **options: Any,
    ) -> MultimodalModel:
        """Compose a model from parts that are pretrained each for itself.

        Args:
            encoders: for each modality a folder or a name on the hub, a model, or a `ModalityEncoder`.
            language_model: a folder or a name on the hub, or a model.
            projectors: for each modality what `ModalityEncoder` takes; an MLP where it says nothing.
            token_ids: as in the constructor.
            options: of each ``from_pretrained``, such as ``dtype``.

        Raises:
            ConfigError: parts that do not fit together.
        """
        projectors = dict(projectors or {})
        if unknown := [name for name in projectors if name not in encoders]:
            rule = "There is no encoder of that name"
            raise ConfigError(f"projectors.{unknown[0]}", unknown[0], rule, did_you_mean(unknown[0], encoders))
        given = {
            name: loaded_encoder(name, encoder, projectors.get(name), options) for name, encoder in encoders.items()
        }
        if isinstance(language_model, str | Path):
            language_model = AutoModelForCausalLM.from_pretrained(language_model, **options)
        return cls(encoders=given, language_model=language_model, token_ids=token_ids)

    def freeze(self, **parts: bool) -> None:
        """Freeze parts (True) or train them (False); what is not named stays as it is.

        Args:
            parts: ``language`` for the language model, for each modality its name for the encoder, and
                ``<name>_projector`` for its projector: ``freeze(vision=True, vision_projector=False, language=True)``.

        Raises:
            ConfigError: there is no such part.
        """
        known: dict[str, Any] = {"language": self.language_model}
        for name, encoder in self.encoders.items():
            known |= {name: encoder.model, f"{name}_projector": encoder.projector}
        for name, frozen in parts.items():
            if name not in known:
                raise ConfigError(f"freeze.{name}", frozen, "The model has no such part", did_you_mean(name, known))
            known[name].requires_grad_(not frozen)

    def num_features(self, name: str, **inputs: Tensor) -> list[int]:
        """Return how many features each item of a modality gives, from the sizes of its inputs, without running it.

        Args:
            name: of the modality.
            inputs: of its encoder, by the names that the encoder's forward has.
        """
        encoder = self.encoders[name] if name in self.encoders else None  # noqa: SIM401
        return feature_counts(self.config, name, inputs, encoder)  # type: ignore[arg-type]

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save everything as one folder, which `from_pretrained` reads.

        Raises:
            ConfigError: a callback or a projector that a configuration cannot name.
        """
        for name in self.encoders:
            encoder = self._encoder(name)
            encoder.check_savable(name)
            if encoder.projector_config is None:
                built_projector(encoder.described()["projector"], f"encoders.{name}", device="meta")
        return super().save_pretrained(*args, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return what the language model returns, with its loss where there are `labels`.

        Args:
            input_ids: (B, S), with placeholder tokens.
            attention_mask: as the language model takes it.
            position_ids: as the language model takes them. Without a mask and a cache, where they restart a document
                of its own begins, which the others in its row do not see.
            inputs_embeds: (B, S, E), instead of `input_ids`; nothing is put in its place.
            labels: (B, S).
            kwargs: inputs of the encoders, by the keys of `encoder_inputs`; ``<name>_items``; and what else the
                language model takes.

        Raises:
            ConfigError: a modality has another number of features than of placeholders.
        """
        inputs, rest = self._inputs_of(kwargs)
        if (input_ids is None) == (inputs_embeds is None) or (inputs and input_ids is None):
            got = {"input_ids": input_ids is not None, "inputs_embeds": inputs_embeds is not None, **inputs}
            rule = "A model takes either tokens, with the inputs of its encoders, or embeddings alone"
            raise ConfigError("MultimodalModel.forward", sorted(key for key in got if got[key]), rule, "Pass input_ids")
        if input_ids is not None:
            inputs_embeds = self._embed(input_ids, inputs, kwargs)
        assert inputs_embeds is not None
        options = {"attention_mask": attention_mask, "position_ids": position_ids, "labels": labels, **rest}
        options = packed_options(self.language_model.config, inputs_embeds, options)
        return self.language_model(inputs_embeds=inputs_embeds, **options)

    @torch.no_grad()
    def generate(  # type: ignore[override]
        self, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any
    ) -> Any:
        """Generate tokens after a prompt; return what the language model's `generate` does, the prompt included.

        Args:
            inputs: the prompt, (B, S), also by the name `input_ids`.
            generation_config: the language model's own by default.
            kwargs: inputs of the encoders as in `forward`, and all that the language model's `generate` takes.
        """
        given, rest = self._inputs_of(kwargs)
        input_ids = rest.pop("input_ids", inputs)
        if input_ids is not None and (given or rest.get("past_key_values") is None):
            embeds = self._embed(input_ids, given, kwargs)
            if given:  # text alone stays tokens, which some language models need
                rest["inputs_embeds"] = embeds
        return self.language_model.generate(input_ids, generation_config, **rest)

    @property
    def generation_config(self) -> Any:
        """The language model's."""
        return self.language_model.generation_config if "language_model" in self._modules else None

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        if "language_model" in self._modules:
            self.language_model.generation_config = value

    def get_image_features(self, **inputs: Tensor) -> BaseModelOutputWithPooling:
        """Return the features of images in `pooler_output`, a tuple of (L_i, E); `inputs` by the encoder's names."""
        return self._features("image", inputs)

    def get_audio_features(self, **inputs: Tensor) -> BaseModelOutputWithPooling:
        """Return the features of pieces of audio, as `get_image_features` does."""
        return self._features("audio", inputs)

    def get_video_features(self, **inputs: Tensor) -> BaseModelOutputWithPooling:
        """Return the features of videos, as `get_image_features` does."""
        return self._features("video", inputs)

    def _features(self, kind: str, inputs: dict[str, Tensor]) -> BaseModelOutputWithPooling:
        name = next((name for name in CUSTOMARY_NAMES[kind] if name in self.encoders), None)
        if name is None:
            rule = f"The model has no encoder of that name, but {', '.join(self.encoders)}"
            raise ConfigError(f"get_{kind}_features", kind, rule, "Call model.encoders[name](inputs)")
        features = self.encoders[name](inputs)
        return BaseModelOutputWithPooling(pooler_output=features.split(self.num_features(name, **inputs)))

    def _encoder(self, name: str) -> ModalityEncoder:
        return self.encoders[name]  # type: ignore[return-value]

    def _embed(self, input_ids: Tensor, inputs: dict[str, dict[str, Tensor]], batch: Mapping[str, Any]) -> Tensor:
        """(B, S) -> (B, S, E), with the features of all items at their placeholders."""
        tokens = {name: token for name, token in self.config.token_ids.items() if name in self.encoders}
        if unknown := [name for name in inputs if name not in tokens]:
            rule = f"The {unknown[0]} encoder has inputs, and no token says where its features belong"
            fix = f"Pass token_ids={{{unknown[0]!r}: ...}}, or make a MultimodalProcessor with model=..."
            raise ConfigError(f"token_ids.{unknown[0]}", None, rule, fix)
        self._placeholders.settle()
        text_ids = input_ids
        for token in tokens.values():
            text_ids = text_ids.masked_fill(text_ids == token, 0)  # a placeholder need not be in the vocabulary
        embeds = self.language_model.get_input_embeddings()(text_ids)
        for name, token in tokens.items():
            features = self.encoders[name](inputs[name]) if name in inputs else None
            items = None
            if name in inputs and self._encoder(name).is_plain:
                items = partial(self._items, name, inputs[name], batch.get(f"{name}_items"))
            embeds = self._placeholders.place(name, token, input_ids, embeds, features, items)
        return embeds

    def _items(self, name: str, inputs: dict[str, Tensor], items: Any) -> Items:
        counts = None if items is None else torch.as_tensor(items).flatten().tolist()
        return self.num_features(name, **inputs), counts

    def _inputs_of(self, kwargs: dict[str, Any]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """What each encoder gets, and what is left; an encoder without its first input gets nothing."""
        rest = {key: value for key, value in kwargs.items() if not self._is_taken(key)}
        inputs = {}
        for name, keys in self.encoder_inputs.items():
            values = {argument: kwargs[key] for argument, key in keys.items() if kwargs.get(key) is not None}
            if any(len(value) for value in values.values()):
                inputs[name] = values
        return inputs, rest

    def _is_taken(self, key: str) -> bool:
        keys = {key for keys in self.encoder_inputs.values() for key in keys.values()}
        return key in keys or key.removesuffix("_items") in self.encoders


def _checked(encoders: Mapping[str, ModalityEncoder] | None, language_model: Any) -> dict[str, ModalityEncoder]:
    fix = "Pass encoders={'vision': ModalityEncoder(...)} and language_model=AutoModelForCausalLM..."
    if not encoders:
        raise ConfigError("encoders", encoders, "A model is composed from at least one encoder", fix)
    for name, encoder in encoders.items():
        if not isinstance(encoder, ModalityEncoder):
            fix = "Write ModalityEncoder(model, projector='mlp')"
            raise ConfigError(f"encoders.{name}", type(encoder).__name__, "It must be a ModalityEncoder", fix)
        if name == "language" or f"{name}_projector" in encoders:
            rule = "`freeze` takes `language` and `<name>_projector` for other parts"
            raise ConfigError(f"encoders.{name}", name, rule, "Give the encoder another name")
    if getattr(getattr(language_model, "config", None), "is_encoder_decoder", False):
        rule = "The language model must be causal, and this one has an encoder and a decoder"
        raise ConfigError("language_model", type(language_model).__name__, rule, fix)
    if not isinstance(language_model, PreTrainedModel) or language_model.get_output_embeddings() is None:
        rule = "The language model is a causal one of transformers, with its head"
        raise ConfigError("language_model", type(language_model).__name__, rule, fix)
    return dict(encoders)


def _config_of(
    encoders: Mapping[str, ModalityEncoder], language_model: Any, token_ids: Mapping[str, int] | None
) -> MultimodalConfig:
    for name in token_ids or {}:
        if name not in encoders:
            raise ConfigError(f"token_ids.{name}", name, "There is no such encoder", did_you_mean(name, encoders))
    return MultimodalConfig(
        encoders={name: encoder.described() for name, encoder in encoders.items()},
        text_config=language_model.config,
        language_model_class=import_path(type(language_model)),
        token_ids=dict(token_ids or {}),
    )


def _built(name: str, entry: Mapping[str, Any]) -> ModalityEncoder:
    projector, field = entry["projector"], f"encoders.{name}"
    if "class" in projector:
        projector = built_projector(projector, field)
    callbacks = {key: entry[key] and from_import_path(entry[key], f"{field}.{key}") for key in CALLBACKS}
    return ModalityEncoder(built_encoder(entry), projector, feature_layer=entry["feature_layer"], **callbacks)


AutoConfig.register(MultimodalConfig.model_type, MultimodalConfig)
AutoModel.register(MultimodalConfig, MultimodalModel)
AutoModelForImageTextToText.register(MultimodalConfig, MultimodalModel)


def loaded_encoder(name: str, source: Any, projector: Any, options: dict[str, Any]) -> ModalityEncoder:
    """Return an encoder with its projector.

    Args:
        name: of the modality, for errors.
        source: a folder or a name on the hub, a model, or an encoder with its projector already.
        projector: what `ModalityEncoder` takes, or None.
        options: of ``from_pretrained``.

    Raises:
        ConfigError: two projectors are given.
    """
    if isinstance(source, ModalityEncoder):
        if projector is not None:
            rule = "The encoder of that name has a projector already"
            raise ConfigError(f"projectors.{name}", projector, rule, "Leave one of them out")
        return source
    model = AutoModel.from_pretrained(source, **options) if isinstance(source, str | Path) else source
    return ModalityEncoder(model, "mlp" if projector is None else projector)
