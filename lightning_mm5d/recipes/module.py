"""A ready LightningModule for people who start from YAML alone: loss, accuracy, optimizer, schedule and samples.

It trains a `MultimodalModel`, or any model that ``AutoModelForImageTextToText`` or another class of transformers loads,
on batches of a `MultimodalCollator` or of a processor: dicts whose keys the model takes, with ``labels``. It knows
nothing of the strategy: a LightningModule of your own can do all of this, and stays the main road.

A recipe says by the names of a model's parts (each encoder, its projector, the language model) what trains and at which
learning rate. The parts of a `MultimodalModel` are its own; those of a Hugging Face model are found as the strategy
finds modalities.

A model is a saved one, or is composed of saved parts. Everything is a folder or a name on the Hugging Face hub, so it
can stand in YAML. Read inside of `configure_model` under this package's strategy, each rank reads only its own weights.

The prompt of a sample is everything before the last stretch of labelled tokens: the last answer of a conversation.

Shapes: B batch, S sequence, P longest prompt.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import transformers
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import MeanMetric
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    get_scheduler,
)

import lightning_mm5d
from lightning_mm5d.config.errors import CheckpointUntrustedError, ConfigError, did_you_mean
from lightning_mm5d.models.multimodal_model import MultimodalModel
from lightning_mm5d.models.processing import IGNORED, MultimodalProcessor
from lightning_mm5d.models.processing import NAME as PROCESSOR_FILE
from lightning_mm5d.partition.find import discover


@contextmanager
def _refused(field: str) -> Iterator[None]:
    """Errors of transformers about folders, names and options become one line that names `field`."""
    try:
        yield
    except (ConfigError, CheckpointUntrustedError):
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        message = next(iter(str(error).splitlines()), type(error).__name__)
        fix = "Check the names of folders and the options"
        raise ConfigError(field, type(error).__name__, f"transformers says: {message.rstrip('.')}", fix) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSource:
    """One encoder of a composed model.

    Args:
        model: folder or name of a model of transformers; of a whole model with several towers, the one that reads this
            modality.
        projector: kind of projector, or its kind and its arguments, such as ``{kind: pixel_shuffle, factor: 2}``.
        processor: folder or name of its image processor or feature extractor. Unset: that of `model`.
    """

    model: str
    projector: str | dict[str, Any] = "mlp"
    processor: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model as YAML names it: ``pretrained``, or ``encoders`` and ``language_model``.

    Args:
        pretrained: folder or name of a whole model, also of a saved `MultimodalModel`.
        encoders: encoders of a composed model, by modality.
        language_model: folder or name of its causal language model.
        dtype: such as ``bfloat16``. Unset: that of the files.
        attn_implementation: such as ``sdpa``. Unset: transformers' default.
    """

    pretrained: str | None = None
    encoders: dict[str, EncoderSource] = dataclasses.field(default_factory=dict)
    language_model: str | None = None
    dtype: str | None = None
    attn_implementation: str | None = None

    def check(self) -> None:
        """Raise ConfigError unless it names one model."""
        composed = bool(self.encoders) and self.language_model is not None
        if (self.pretrained is not None) == composed or (self.pretrained and (self.encoders or self.language_model)):
            rule = "A model is `pretrained`, or composed of `encoders` and a `language_model`"
            given = {key: value for key, value in vars(self).items() if value}
            raise ConfigError("model.model", sorted(given), rule, "Name one of the two")

    @_refused("model.model")
    def load(self) -> PreTrainedModel:
        """Return the model. In `configure_model` under this package's strategy its weights are read later.

        Raises:
            ConfigError: there is no such model, or its parts do not fit together.
        """
        self.check()
        settings = {"dtype": self.dtype, "attn_implementation": self.attn_implementation}
        options: dict[str, Any] = {key: value for key, value in settings.items() if value is not None}
        if self.pretrained is not None:
            cls = named_class(AutoConfig.from_pretrained(self.pretrained)) or AutoModelForImageTextToText
            return lightning_mm5d.from_pretrained(cls, self.pretrained, **options)
        assert self.language_model is not None
        encoders = {name: encoder.model for name, encoder in self.encoders.items()}
        projectors = {name: encoder.projector for name, encoder in self.encoders.items()}
        return MultimodalModel.from_pretrained_parts(
            encoders=encoders, language_model=self.language_model, projectors=projectors, **options
        )

    @_refused("model.processor")
    def load_processor(self, model: nn.Module) -> Any:
        """Return the processor of the saved model, or one composed of the parts', which sets the model's tokens.

        Args:
            model: as `load` returned it.
        """
        if self.pretrained is not None:
            return load_processor(self.pretrained)
        processors = {name: _part_processor(part.processor or part.model) for name, part in self.encoders.items()}
        return MultimodalProcessor(AutoTokenizer.from_pretrained(self.language_model), processors, model)


def load_processor(folder: str | Path) -> Any:
    """Return the processor in a folder or of a name on the hub, a `MultimodalProcessor` or one of transformers."""
    if (Path(folder) / PROCESSOR_FILE).is_file():
        return MultimodalProcessor.from_pretrained(folder)
    return AutoProcessor.from_pretrained(folder)


def _part_processor(folder: str) -> Any:
    """The image processor or feature extractor of one encoder."""
    try:
        return AutoImageProcessor.from_pretrained(folder)
    except (OSError, ValueError):  # a folder without one
        return AutoFeatureExtractor.from_pretrained(folder)


def named_class(config: PreTrainedConfig) -> Any:
    """Return the class that the configuration of a saved model names; None where transformers has none of its names."""
    classes = (getattr(transformers, str(name), None) for name in config.architectures or ())
    return next((cls for cls in classes if isinstance(cls, type) and issubclass(cls, PreTrainedModel)), None)


class MultimodalModule(L.LightningModule):
    """Trains a multimodal model to write the labelled tokens.

    It logs ``train_loss`` and ``train_accuracy`` (of labelled tokens), ``val_loss`` and ``val_accuracy``, and with
    `samples` ``val_exact_match``: how many generated answers are right in every character.

    Args:
        model: where the model comes from; or the model itself, which must not be given as YAML.
        processor: folder or name of the processor, where it is not that of `model`; or the processor. Samples need it,
            and so does a `MultimodalDataModule` that names none. That of a composed model is made of its parts'.
        train: which parts train, such as ``{vision: false, vision_projector: true, language: false}``. Parts that are
            left out train, without `lora`.
        lora: arguments of PEFT's ``LoraConfig``, such as ``{r: 8, target_modules: [q_proj, v_proj]}``. Then only
            adapters train, and the parts that `train` says.
        learning_rate: the highest one, of all parts that `learning_rates` leaves out.
        learning_rates: the highest one of each part, such as ``{vision: 2.0e-6}``.
        weight_decay: of matrices; biases and norms have none.
        warmup: optimizer steps until the highest learning rate; below 1 the fraction of all steps.
        schedule: a name of ``transformers.get_scheduler``: what follows the warm-up.
        samples: how many answers a validation generates, of the first batches of each replica.
        max_new_tokens: the most tokens of a generated answer.
    """

    def __init__(
        self,
        model: ModelSource | nn.Module,
        processor: str | Any | None = None,
        *,
        train: dict[str, bool] | None = None,
        lora: dict[str, Any] | None = None,
        learning_rate: float = 2e-5,
        learning_rates: dict[str, float] | None = None,
        weight_decay: float = 0.0,
        warmup: float = 0.03,
        schedule: Literal["cosine", "linear", "constant", "constant_with_warmup", "polynomial"] = "cosine",
        samples: int = 0,
        max_new_tokens: int = 64,
    ) -> None:
        super().__init__()
        self._source = model if isinstance(model, ModelSource) else None
        self.model: Any = None if isinstance(model, ModelSource) else model
        self._processor = processor
        self.train_parts, self.lora = dict(train or {}), lora
        self.learning_rate, self.learning_rates = learning_rate, dict(learning_rates or {})
        self.weight_decay, self.warmup, self.schedule = weight_decay, warmup, schedule
        self.samples, self.max_new_tokens = samples, max_new_tokens
        self.train_accuracy, self.val_accuracy, self.val_loss = MeanMetric(), MeanMetric(), MeanMetric()
        self._shown: list[dict[str, Any]] = []
        self._is_prepared = False
        _check(self)

    @property
    def processor(self) -> Any:
        """The processor; of a composed model once it is built, None where there is none."""
        if isinstance(self._processor, str | Path):
            self._processor = load_processor(self._processor)
        return self._processor

    def configure_model(self) -> None:
        """Build the model, add adapters, and freeze what does not train. Once, also when it is called again."""
        if self._is_prepared:
            return
        if self.model is None:
            assert self._source is not None
            self.model = self._source.load()
            if self._processor is None:
                self._processor = self._source.load_processor(self.model)
        if self.lora is not None:
            self.model = _with_adapters(self.model, self.lora)
        names = part_names(self.model)
        check_names("train", self.train_parts, names)
        check_names("learning_rates", self.learning_rates, names)
        for name, parameter in self.model.named_parameters():
            if names[name] in self.train_parts:
                parameter.requires_grad_(self.train_parts[names[name]])
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ConfigError("train", self.train_parts, "No parameter trains", "Let one part train")
        self.model.train()  # what `from_pretrained` returns is in evaluation mode, and Lightning leaves modes alone
        self._is_prepared = True

    def forward(self, **batch: Any) -> Any:
        """The model's output."""
        assert self.model is not None
        return self.model(**batch)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """The model's loss."""
        output = self._run(batch)
        self.log("train_loss", output.loss, prog_bar=True)
        if output.logits is not None:  # a fused head makes none
            self._count(self.train_accuracy, output.logits, batch["labels"])
            self.log("train_accuracy", self.train_accuracy)
        return output.loss

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Log the loss and the accuracy."""
        output = self._run(batch)
        counted = (batch["labels"][:, 1:] != IGNORED).sum()
        self.val_loss.update(torch.where(counted > 0, output.loss, 0.0), counted)  # without labels it is no number
        self.log("val_loss", self.val_loss, prog_bar=True)
        self._count(self.val_accuracy, output.logits, batch["labels"])
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """As `validation_step`."""
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> list[str] | Tensor:
        """Generate answers to prompts, or to all but the last answers of a batch with labels.

        Returns:
            The answers; without a processor their tokens ``(B, max_new_tokens)``, padded on the right.
        """
        processor, model = self.processor, self.model
        assert model is not None
        tokenizer = getattr(processor, "tokenizer", processor)  # that of a text model is its tokenizer
        if batch.get("labels") is not None:
            if tokenizer is None:
                rule = "Prompts are cut out of a batch with labels and padded, for which a tokenizer is needed"
                raise ConfigError("processor", None, rule, "Give the processor's folder, or batches without labels")
            batch = prompts(batch, tokenizer)
        tokens = self._generated(batch)
        if tokenizer is not None:
            return [text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]
        # microbatches of unequal lengths are one batch, padded as `generate` pads
        config = model.generation_config
        padding = config.eos_token_id if config.pad_token_id is None else config.pad_token_id
        padding = padding[0] if isinstance(padding, list) else padding
        return nn.functional.pad(tokens, (0, self.max_new_tokens - tokens.shape[1]), value=padding or 0)

    def _generated(self, batch: Mapping[str, Any]) -> Tensor:
        """The tokens after prompts, (B, at most max_new_tokens)."""
        assert self.model is not None
        tokens = self.model.generate(**batch, max_new_tokens=self.max_new_tokens, do_sample=False)
        return tokens if self.model.config.is_encoder_decoder else tokens[:, batch["input_ids"].shape[1] :]

    def _run(self, batch: Mapping[str, Any]) -> Any:
        if batch.get("labels") is None:
            rule = "The loss and the accuracy are those of labelled tokens"
            raise ConfigError("batch.labels", sorted(batch), rule, "Use a MultimodalCollator, or add labels")
        return self(**batch, use_cache=False)

    @staticmethod
    def _count(metric: MeanMetric, logits: Tensor, labels: Tensor) -> None:
        right, counted = logits[:, :-1].argmax(-1) == labels[:, 1:], labels[:, 1:] != IGNORED
        metric.update(right.float(), counted.float())

    def on_validation_batch_end(
        self, outputs: Any, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Generate answers to the prompts of the first batches."""
        left = self.samples - len(self._shown)
        if left <= 0 or dataloader_idx:
            return
        tokenizer = self.processor.tokenizer
        with torch.no_grad():
            asked = prompts(batch, tokenizer)
            tokens = self._generated(asked)
        answered = [pair for pair in zip(tokens, targets(batch), strict=True) if len(pair[1])]
        for answer, target in answered[:left]:
            self._shown.append(exact(tokenizer, answer, target))

    def on_validation_epoch_end(self) -> None:
        """Log how many generated answers are right, and write them to ``samples.jsonl`` in the root folder."""
        if self._shown:
            right = sum(sample["right"] for sample in self._shown) / len(self._shown)
            self.log("val_exact_match", right, prog_bar=True, sync_dist=True)
            if self.trainer.is_global_zero and not self.trainer.sanity_checking:
                write_samples(Path(self.trainer.default_root_dir) / "samples.jsonl", self.global_step, self._shown)
        self._shown = []

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW, a group of parameters for each part and weight decay; the schedule counts optimizer steps."""
        assert self.model is not None
        names, groups = part_names(self.model), dict[tuple[str, bool], list[nn.Parameter]]()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                groups.setdefault((names[name], parameter.dim() > 1), []).append(parameter)
        optimizer = torch.optim.AdamW(
            [
                {
                    "params": parameters,
                    "lr": self.learning_rates.get(part, self.learning_rate),
                    "weight_decay": self.weight_decay if decays else 0.0,
                    "name": part if decays else f"{part}, no decay",
                }
                for (part, decays), parameters in groups.items()
            ]
        )
        steps = self.trainer.estimated_stepping_batches
        if steps == float("inf"):
            rule = "The schedule ends with the training, which has no last step"
            raise ConfigError("trainer.max_steps", self.trainer.max_steps, rule, "Set max_steps or max_epochs")
        steps = int(steps)
        warmup = round(self.warmup * steps) if self.warmup < 1 else int(self.warmup)
        name = "constant_with_warmup" if self.schedule == "constant" else self.schedule
        scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _with_adapters(model: Any, arguments: dict[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model

    try:
        return get_peft_model(model, LoraConfig(**arguments))
    except (TypeError, ValueError) as error:
        rule = f"PEFT says: {' '.join(str(error).split()).rstrip('.')}"
        fix = "Name arguments of LoraConfig, and target_modules that the model has"
        raise ConfigError("lora", arguments, rule, fix) from error


def _check(module: MultimodalModule) -> None:
    if module._source is not None:
        module._source.check()
    for field in ("learning_rate", "weight_decay", "warmup", "samples"):
        if getattr(module, field) < 0:
            raise ConfigError(field, getattr(module, field), "It is 0 or more", "Use 0")
    if module.max_new_tokens < 1:
        raise ConfigError("max_new_tokens", module.max_new_tokens, "It is at least 1", "Use 64")
    if module.samples and module._processor is None and module._source is None:
        fix = "Give the processor's folder, or set samples to 0"
        raise ConfigError("processor", None, "Generated answers are decoded by a processor", fix)


LANGUAGE = "language"
PROJECTOR = "_projector"


def part_names(model: nn.Module) -> dict[str, str]:
    """Return for each parameter of `model` the name of its part.

    ``{"encoders.vision.model.conv.weight": "vision", "encoders.vision.projector.fc1.weight": "vision_projector",
    "language_model.lm_head.weight": "language"}``. Adapters of PEFT belong to the part that they adapt.
    """
    owners: dict[str, str] = {}
    for name, encoder in discover(model).items():
        for path in encoder.owns:
            owners |= _halves(model, path, name)
    parts = {}
    for parameter, _ in model.named_parameters():
        under = [path for path in owners if parameter == path or parameter.startswith(f"{path}.")]
        parts[parameter] = owners[max(under, key=len)] if under else LANGUAGE
    return parts


def _halves(model: nn.Module, path: str, name: str) -> dict[str, str]:
    """The paths of an encoder's tower and projector below `path`, which may be one of the two or hold both."""
    held = path.rpartition(".")[2]
    if "projector" in held or "connector" in held or held.startswith("embed_"):
        return {path: name + PROJECTOR}
    module = dict(model.named_modules()).get(path)  # none where it is a parameter
    inner = () if module is None else module.named_children()
    projectors = {
        f"{path}.{child}": name + PROJECTOR for child, _ in inner if "projector" in child or child == "merger"
    }
    return {path: name, **projectors}


def check_names(field: str, given: Mapping[str, object], names: Mapping[str, str]) -> None:
    """Refuse a name in `given` that is no part of the model.

    Args:
        field: path of the field, for the error.
        given: by name of the part.
        names: as `part_names` returns them.

    Raises:
        ConfigError: a part does not exist.
    """
    known = sorted(set(names.values()))
    for name in given:
        if name not in known:
            rule = f"The model has the parts {', '.join(known)}"
            raise ConfigError(f"{field}.{name}", given[name], rule, did_you_mean(name, known))


_TEXT = ("labels", "position_ids", "loss_mask")


def prompts(batch: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the batch as ``generate`` takes it: prompts ``(B, P)``, padded on the left, and what encoders take.

    Args:
        batch: ``input_ids``, ``labels`` and ``attention_mask`` ``(B, S)``, and inputs of encoders.
        tokenizer: names the token that pads.
    """
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    mask = ids.new_ones(ids.shape) if mask is None else mask
    starts = [_last_answer(row)[0] for row in batch["labels"]]
    unpadded = [row[:start][seen[:start].bool()] for row, seen, start in zip(ids, mask, starts, strict=True)]
    width = max(len(row) for row in unpadded)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    prompt = ids.new_full((len(unpadded), width), 0 if padding is None else padding)
    seen = mask.new_zeros(len(unpadded), width)
    for at, row in enumerate(unpadded):
        prompt[at, width - len(row) :] = row
        seen[at, width - len(row) :] = 1
    rest = {key: value for key, value in batch.items() if key not in ("input_ids", "attention_mask", *_TEXT)}
    return {"input_ids": prompt, "attention_mask": seen, **rest}


def targets(batch: Mapping[str, Any]) -> list[Tensor]:
    """Return the tokens of each sample's last answer."""
    rows = zip(batch["input_ids"], batch["labels"], strict=True)
    return [row[slice(*_last_answer(labels))] for row, labels in rows]


def _last_answer(labels: Tensor) -> tuple[int, int]:
    """Where the last stretch of labelled tokens starts and stops; at the end where there is none."""
    counted = (labels != IGNORED).tolist()
    stretches = groupby(range(len(counted)), key=counted.__getitem__)
    answers = [list(places) for is_counted, places in stretches if is_counted]
    return (answers[-1][0], answers[-1][-1] + 1) if answers else (len(counted), len(counted))


def exact(tokenizer: Any, answer: Tensor, target: Tensor) -> dict[str, Any]:
    """Return what was generated and what was right, as text, and whether they are equal but for blanks around."""
    got, wanted = (tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in (answer, target))
    return {"answer": got, "target": wanted, "right": got == wanted}


def write_samples(path: Path, step: int, shown: Sequence[Mapping[str, Any]]) -> None:
    """Append samples to a JSONL file, each with the optimizer step at which it was generated."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for sample in shown:
            file.write(json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n")
