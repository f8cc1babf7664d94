"""Where a recipe's model comes from: a saved model, or saved parts that are composed.

Everything is a folder or a name on the Hugging Face hub, so it can stand in YAML. Read inside of `configure_model`
under this package's strategy, each rank reads only its own weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
)

import lightning_mm5d
from lightning_mm5d.config.errors import CheckpointUntrustedError, ConfigError
from lightning_mm5d.models.multimodal_model import MultimodalModel
from lightning_mm5d.models.processing import NAME as PROCESSOR_FILE
from lightning_mm5d.models.processing import MultimodalProcessor


@contextmanager
def _refused(field: str) -> Iterator[None]:
    """Errors of transformers about folders, names and options become one line that names `field`."""
    try:
        yield
    except (ConfigError, CheckpointUntrustedError):
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        fix = "Check the names of folders and the options"
        raise ConfigError(field, type(error).__name__, f"transformers says: {said.rstrip('.')}", fix) from error


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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
    encoders: dict[str, EncoderSource] = field(default_factory=dict)
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
        said = {"dtype": self.dtype, "attn_implementation": self.attn_implementation}
        options: dict[str, Any] = {key: value for key, value in said.items() if value is not None}
        if self.pretrained is not None:
            return lightning_mm5d.from_pretrained(_class_of(self.pretrained), self.pretrained, **options)
        assert self.language_model is not None
        encoders = {name: one.model for name, one in self.encoders.items()}
        projectors = {name: one.projector for name, one in self.encoders.items()}
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
        processors = {name: _part_processor(one.processor or one.model) for name, one in self.encoders.items()}
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


def _class_of(folder: str) -> Any:
    """The class that a saved model names, where transformers has it."""
    config = AutoConfig.from_pretrained(folder)
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    return AutoModelForImageTextToText
