"""Text and items of any modality, made into the batch of a `MultimodalModel`.

An item's placeholder token becomes as many as its encoder will give features, which is computed from the model's
configuration and the item's size. The model checks that number against its encoder's result.

Shapes: B samples, S tokens, N items of a modality in the batch.

A processor is saved as JSON and the files of its parts, nothing that runs code.

Layout of a folder: the tokenizer's files, ``multimodal_processor.json`` (modalities, placeholder tokens, the model's
configuration), and ``processors/<name>/`` for each modality. Functions are named there as missing; their code is
never read from a folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    AutoVideoProcessor,
    BatchEncoding,
    FeatureExtractionMixin,
    ImageProcessingMixin,
    PreTrainedTokenizerBase,
)
from transformers.video_processing_utils import BaseVideoProcessor

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.models.chat import ChatEncoder, Item, Message, default_template, messages_of
from lightning_mm5d.models.encoder_kinds import input_names
from lightning_mm5d.models.item_inputs import (
    ItemForm,
    ItemLoad,
    Processor,
    Values,
    blank_of,
    item_values,
    joined,
    plain_processor,
    takes_blanks,
)
from lightning_mm5d.models.modality_encoder import batch_keys, feature_counts
from lightning_mm5d.models.multimodal_config import MultimodalConfig

NAME = "multimodal_processor.json"
_KINDS: dict[str, tuple[type, Any]] = {
    "video": (BaseVideoProcessor, AutoVideoProcessor),
    "image": (ImageProcessingMixin, AutoImageProcessor),
    "feature": (FeatureExtractionMixin, AutoFeatureExtractor),
}
"""classes of processors that are saved, and what loads them"""
IGNORED = -100
"""The label of a token that is not learned."""


@dataclass(frozen=True)
class Sample:
    """One conversation, ready for a batch.

    Attributes:
        ids: tokens, with one placeholder for each feature. [S]
        labels: the ids that are learned, `IGNORED` elsewhere. [S]
        values: for each modality what its encoder takes of the sample's items, one entry for each item of a message.
        items: for each modality how many items its encoder sees; a message's item may be several.
        source: what errors call it.
    """

    ids: list[int]
    labels: list[int]
    values: Mapping[str, Sequence[Values]]
    items: Mapping[str, int]
    source: str

    def __len__(self) -> int:
        return len(self.ids)


class MultimodalProcessor:
    """A tokenizer, and one processor for each modality.

    Args:
        tokenizer: a fast tokenizer of the language model. Placeholder tokens that it lacks are added to it, and a plain
            chat template if it has none.
        processors: for each modality an image processor, a video processor or a feature extractor of transformers, or
            a function that takes a list of one item and returns what the encoder takes.
        model: the model or its configuration, which tells how many features an item has. Its placeholder tokens are
            set, and embeddings of a model become as many as the tokenizer has tokens, if they are fewer.
        tokens: for each modality its placeholder token; ``<|vision|>`` and so on by default.
        frames: at most so many frames of a video; None takes all.

    Raises:
        ConfigError: parts that do not fit together.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processors: Mapping[str, Any],
        model: Any,
        *,
        tokens: Mapping[str, str] | None = None,
        frames: int | None = None,
    ) -> None:
        self.config = _configuration(model)
        if not tokenizer.is_fast:
            rule = "What the assistant says is found by the places of tokens, which fast tokenizers alone tell"
            raise ConfigError("tokenizer", type(tokenizer).__name__, rule, "Load it by AutoTokenizer")
        names, tokens = set(self.config.encoders), tokens or {}
        for field, given, others in (
            ("processors", processors, names ^ {*processors}),
            ("tokens", tokens, {*tokens} - {*processors}),
        ):
            if others:
                rule = f"There is one for each modality of the model: {', '.join(self.config.encoders)}"
                raise ConfigError(field, sorted(given), rule, f"Add or remove {min(others)!r}")
        self.tokenizer, self.frames = tokenizer, frames
        self.processors: dict[str, Processor] = {n: plain_processor(n, p) for n, p in processors.items()}
        self.tokens = {name: tokens.get(name, f"<|{name}|>") for name in processors}
        self.token_ids = _add_tokens(tokenizer, self.tokens)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = default_template(tokenizer)
        self.config.token_ids = dict(self.token_ids)
        if model is not self.config and len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        self._forms: dict[Any, ItemForm | None] = {}
        self._chat = ChatEncoder(tokenizer, self.tokens)
        self._keys = batch_keys(self.config)

    @property
    def pad_token_id(self) -> int:
        """The token of padding: the tokenizer's, or the one that ends a text; masks and labels leave it out."""
        token = self.tokenizer.pad_token_id
        token = self.tokenizer.eos_token_id if token is None else token
        if token is None:
            rule = "Batches are padded with it, and this tokenizer has neither a pad_token nor an eos_token"
            raise ConfigError("tokenizer.pad_token", None, rule, "Set tokenizer.pad_token")
        return int(token)

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        padding_side: str = "left",
        return_tensors: str = "pt",
        add_special_tokens: bool = True,
        **items: Any,
    ) -> BatchEncoding:
        """The batch of texts that hold placeholder tokens, for ``model.generate(**batch)``.

        Args:
            text: one text, or B texts.
            padding_side: ``"left"`` to generate, ``"right"`` to train.
            return_tensors: ``"pt"``.
            add_special_tokens: whether the tokenizer puts its own at the ends; a text that starts with the first of
                them gets none.
            items: for each modality the items (or paths) of one text, or B lists of them.

        Raises:
            ConfigError: a modality that does not exist, or texts with more or fewer placeholders than items.
        """
        texts = [text] if isinstance(text, str) else list(text)
        if isinstance(text, str):
            items = {name: None if value is None else [_listed(value)] for name, value in items.items()}
        given = {name: self._per_text(name, value, texts) for name, value in items.items() if value is not None}
        if not texts:
            raise ConfigError("text", [], "A batch has at least one text", "Pass one")
        samples = []
        for index, words in enumerate(texts):
            begins = self.tokenizer.bos_token is not None and words.startswith(self.tokenizer.bos_token)
            ids = self.tokenizer(words, add_special_tokens=add_special_tokens and not begins)["input_ids"]
            text_items = {name: lists[index] for name, lists in given.items()}
            samples.append(self._sample(ids, [IGNORED] * len(ids), text_items, f"text[{index}]"))
        return _as_tensors(self.batch(samples, padding_side=padding_side), return_tensors, ("labels",))

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        labels: bool = False,
        padding_side: str | None = None,
        return_tensors: str = "pt",
        **options: Any,
    ) -> Any:
        """The batch of one conversation, or of a list of them; or their texts.

        Args:
            messages: messages of Hugging Face's format, whose items carry their files.
            tokenize: whether to return a batch; False returns the text, with one placeholder for each item.
            add_generation_prompt: whether the assistant is to speak next.
            labels: whether the batch has labels for what the assistant says.
            padding_side: ``"left"``, or ``"right"`` with labels.
            return_tensors: ``"pt"``.
            options: for the template, such as ``tools``.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        rows = [{"messages": list(chat)} for chat in ([messages] if is_one else messages)]
        options = {**options, "add_generation_prompt": add_generation_prompt}
        if not tokenize:
            texts = [self._chat.render(messages_of(row, self.processors), **options) for row in rows]
            return texts[0] if is_one else texts
        samples = [self.encode(row, with_labels=labels, **options) for row in rows]
        batch = self.batch(samples, padding_side=padding_side or ("right" if labels else "left"))
        return _as_tensors(batch, return_tensors, () if labels else ("labels",))

    def encode(
        self,
        row: Mapping[str, Any],
        *,
        with_labels: bool = True,
        prompt: bool = False,
        lazy: bool = False,
        **options: Any,
    ) -> Sample:
        """One sample of a row with ``messages`` (Hugging Face's format) or ``conversations`` (LLaVA's).

        Args:
            row: further keys: ``"source"`` (what errors call it), ``"root"`` (the folder of its paths), ``"tools"``.
            with_labels: whether to label what the assistant says, with the token that ends its turn.
            prompt: whether to leave out a last turn of the assistant, and have it speak next; without labels.
            lazy: whether files are decoded where something reads them, as far as their headers tell what they give:
                images, wav files, videos in mp4, mov and avi, and frames in a folder or a list, through a processor of
                transformers and without a callback before the encoder.
            options: for the template.

        Raises:
            ConfigError: with the row's source, where the row, a file or the template does not fit.
        """
        source = str(row.get("source", "sample"))
        messages = messages_of(row, self.processors)
        if row.get("tools"):
            options = {"tools": row["tools"], **options}
        if prompt:
            messages = messages[:-1] if messages and messages[-1].role == "assistant" else messages
            with_labels, options = False, {**options, "add_generation_prompt": True}
        try:
            chat = self._chat.encode(messages, with_labels=with_labels, **options)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error.field}", error.got, error.rule, error.fix) from error
        labels = [token if spoken else IGNORED for token, spoken in zip(chat.ids, chat.spoken, strict=True)]
        return self._sample(chat.ids, labels, _items_of(messages), source, lazy=lazy)

    def batch(
        self, samples: Sequence[Sample], *, padding_side: str = "right", length: int | None = None
    ) -> dict[str, Tensor]:
        """The tensors of `samples`, one row each.

        Args:
            samples: B samples.
            padding_side: where shorter ones are padded.
            length: S, the longest sample's by default.

        Returns:
            ``input_ids``, ``attention_mask`` and ``labels`` [B, S], for each modality ``<name>_items`` [B] and, where
            the batch has items, what its encoder takes.
        """
        if padding_side not in ("left", "right"):
            raise ConfigError("padding_side", padding_side, "Padding is on the left or right", 'Use "left" or "right"')
        size = max([len(sample) for sample in samples] if length is None else [length])
        left = padding_side == "left"

        def padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
            full = [[fill] * (size - len(r)) + list(r) if left else list(r) + [fill] * (size - len(r)) for r in rows]
            return torch.tensor(full, dtype=torch.long)

        return {
            "input_ids": padded([sample.ids for sample in samples], self.pad_token_id),
            "attention_mask": padded([[1] * len(sample) for sample in samples], 0),
            "labels": padded([sample.labels for sample in samples], IGNORED),
            **self.item_tensors(samples),
        }

    def item_tensors(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """What encoders take of the items of `samples`, and ``<name>_items`` [B]."""
        result: dict[str, Tensor] = {}
        for name, processor in self.processors.items():
            result[f"{name}_items"] = torch.tensor([sample.items.get(name, 0) for sample in samples])
            values = [value for sample in samples for value in sample.values.get(name, ())]
            if values:
                tensors = joined(name, values, getattr(processor, "padding_value", 0.0))
                result |= {self._keys[name][field]: value for field, value in tensors.items()}
        return result

    def decode(self, *args: Any, **options: Any) -> Any:
        """As the tokenizer's."""
        return self.tokenizer.decode(*args, **options)

    def batch_decode(self, *args: Any, **options: Any) -> Any:
        """As the tokenizer's."""
        return self.tokenizer.batch_decode(*args, **options)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the tokenizer, the processors and the configuration that counts features, as JSON, into `folder`.

        A model may be saved into the same folder. Functions are not saved: pass them again when loading.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save_pretrained(folder)
        kinds: dict[str, str | None] = {}
        for name, processor in self.processors.items():
            kinds[name] = next((kind for kind, (cls, _) in _KINDS.items() if isinstance(processor, cls)), None)
            if kinds[name] is not None:
                processor.save_pretrained(folder / "processors" / name)  # type: ignore[attr-defined]
        fields = {"tokens": self.tokens, "processors": kinds, "frames": self.frames, "model": self.config.to_dict()}
        (folder / NAME).write_text(json.dumps(fields, indent=2, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, model: Any = None, processors: Mapping[str, Processor] | None = None
    ) -> MultimodalProcessor:
        """Read what `save_pretrained` wrote.

        Args:
            folder: that holds it.
            model: the model that is used with it, whose placeholder tokens are set; None uses the saved configuration.
            processors: functions that take the place of saved ones.

        Raises:
            ConfigError: the folder holds no processor, or a function is missing.
        """
        folder, given = Path(folder), dict(processors or {})
        path = folder / NAME
        if not path.is_file():
            rule = f"A saved processor has a file {NAME}"
            raise ConfigError("folder", str(folder), rule, "Pass the folder that save_pretrained wrote")
        fields, loaded = json.loads(path.read_text(encoding="utf-8")), dict[str, Processor]()
        for name, kind in fields["processors"].items():
            if Path(name).name != name:
                rule = "It is the name of a modality"
                raise ConfigError(f"{path}: processors", name, rule, "Save the processor again")
            if kind not in (*_KINDS, None) or (kind is None and name not in given):
                rule = "It is a function, which is not saved"
                fix = f"Write from_pretrained(folder, processors={{{name!r}: ...}})"
                raise ConfigError(f"{path}: processors.{name}", kind, rule, fix)
            saved = folder / "processors" / name
            loaded[name] = given[name] if name in given else _KINDS[kind][1].from_pretrained(saved)
        model = MultimodalConfig.from_dict(fields["model"]) if model is None else model
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return cls(tokenizer, loaded, model, tokens=fields["tokens"], frames=fields["frames"])

    def _per_text(self, name: str, value: Any, texts: Sequence[str]) -> list[list[Any]]:
        """The items of each text: as given, or in order, one for each placeholder."""
        if name not in self.processors:
            raise ConfigError(name, type(value).__name__, "It is no modality", did_you_mean(name, self.processors))
        lists = _listed(value)
        if not any(isinstance(part, list | tuple) for part in lists if part is not None):
            counts = [words.count(self.tokens[name]) for words in texts]
            if sum(counts) == len(lists):
                return [list(lists[end - count : end]) for count, end in zip(counts, accumulate(counts), strict=True)]
        elif len(lists) == len(texts):
            return [[] if part is None else _listed(part) for part in lists]
        rule = f"There are {len(texts)} texts, and each has a list of items"
        fix = f"Pass {name}=[[...], [...]], one list for each text"
        raise ConfigError(name, f"{len(lists)} items", rule, fix)

    def _sample(
        self,
        ids: Sequence[int],
        labels: Sequence[int],
        items: Mapping[str, list[Any]],
        source: str,
        *,
        lazy: bool = False,
    ) -> Sample:
        """Process items and put as many placeholders in the place of each as it has features."""
        values: dict[str, list[Values]] = {name: [] for name in self.processors}
        counts: dict[str, list[int]] = {name: [] for name in self.processors}
        seen = dict.fromkeys(self.processors, 0)
        for name, members in items.items():
            for member in members:
                tensors, sizes = (self._told(name, member, source) if lazy else None) or self._processed(
                    name, member, source
                )
                values[name].append(tensors)
                counts[name].append(sum(sizes))
                seen[name] += len(sizes)
        left = {token: iter(counts[name]) for name, token in self.token_ids.items()}
        for name, token in self.token_ids.items():
            if (places := ids.count(token)) != len(counts[name]):
                rule = f"It has {len(counts[name])} items of {name} for {places} placeholders {self.tokens[name]}"
                raise ConfigError(source, places, rule, "Write one placeholder for each item")
        full, learned = [], []
        for token, label in zip(ids, labels, strict=True):
            size = next(left[token]) if token in left else 1
            full += [token] * size
            learned += [IGNORED if token in left else label] * size
        return Sample(full, learned, values, seen, source)

    def _told(self, name: str, item: Any, source: str) -> tuple[Values, Sequence[int]] | None:
        """What an item's header tells of it, with what it shows as a `LazyTensor`; None where it is to be decoded."""
        processor, entry = self.processors[name], self.config.encoders[name]
        if entry["before"] is not None or not takes_blanks(processor):
            return None
        blank = blank_of(item, sampling_rate=getattr(processor, "sampling_rate", None), frames=self.frames)
        if blank is None:
            return None
        key, content = (name, blank[0]), blank[1]
        if key not in self._forms:
            self._forms[key] = self._form(name, content, source)
        form = self._forms[key]
        if form is None:
            return None
        load = ItemLoad(name, processor, entry["model"], item, self.frames, form, source)
        return load.lazily(), form.counts

    def _form(self, name: str, blank: Any, source: str) -> ItemForm | None:
        try:
            values, counts = self._processed(name, blank, source)
        except ConfigError:  # which decoding reports
            return None
        main = input_names(self.config.encoders[name]["model"])[0]
        if main not in values:
            return None
        return ItemForm(main, {**values, main: values[main].to("meta")}, tuple(counts))

    def _processed(self, name: str, item: Any, source: str) -> tuple[Values, list[int]]:
        try:
            config = self.config.encoders[name]["model"]
            values = item_values(name, self.processors[name], config, item, self.frames)
            counts = feature_counts(self.config, name, values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error.field}", error.got, error.rule, error.fix) from error
        except (TypeError, ValueError) as error:  # of transformers' processors
            kind = type(self.processors[name]).__name__
            raise ConfigError(f"{source}: {name}", type(item).__name__, f"{kind} says: {error}", "Check it") from error
        if not all(counts):
            rule = "Its encoder gives no features for it"
            raise ConfigError(f"{source}: {name}", type(item).__name__, rule, "Remove it, or check its size")
        return values, counts


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _items_of(messages: Sequence[Message]) -> dict[str, list[Any]]:
    items: dict[str, list[Any]] = {}
    for message in messages:
        for part in message.content:
            if isinstance(part, Item):
                items.setdefault(part.name, []).append(part.value)
    return items


def _add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, str]) -> dict[str, int]:
    if len(set(tokens.values())) < len(tokens):
        raise ConfigError("tokens", dict(tokens), "Each modality has a placeholder of its own", "Use other tokens")
    special = [AddedToken(token, special=True, normalized=False) for token in tokens.values()]
    tokenizer.add_tokens(special, special_tokens=True)
    ids: Any = tokenizer.convert_tokens_to_ids(list(tokens.values()))
    return dict(zip(tokens, ids, strict=True))


def _configuration(model: Any) -> MultimodalConfig:
    config = getattr(model, "config", model)
    if not isinstance(config, MultimodalConfig):
        rule = "A MultimodalModel or its configuration tells how many features an item has"
        fix = "Pass the model; for other models use their AutoProcessor"
        raise ConfigError("model", type(model).__name__, rule, fix)
    return config


def _as_tensors(batch: dict[str, Tensor], return_tensors: str, without: Sequence[str]) -> BatchEncoding:
    if return_tensors != "pt":
        raise ConfigError("return_tensors", return_tensors, "Batches are tensors of PyTorch", 'Use "pt"')
    return BatchEncoding({key: value for key, value in batch.items() if key not in without})
