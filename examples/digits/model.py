"""A model that sees a digit, hears a digit, and writes both and their sum; an ordinary LightningModule around it.

`DigitsModel` is put together as multimodal models are: a vision transformer and a Whisper encoder, each with a
projector, replace the placeholder tokens of a text that a small Llama continues. All three are Hugging Face
classes with random weights. Nothing here knows how it is parallelised. There is no dropout, so a step is a
function of its batch. The towers refuse inputs of other sizes than `data.py` makes.

Shapes: B batch, S tokens, D width of the language model, V vocabulary.
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics.classification import MulticlassExactMatch
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel, WhisperConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from data import ANSWER_LENGTH, AUDIO_ID, AUDIO_TOKENS, IMAGE_ID, IMAGE_TOKENS, MELS, VOCABULARY

SEQUENCE = IMAGE_TOKENS + AUDIO_TOKENS + 1 + ANSWER_LENGTH


class DigitsModel(nn.Module):
    """Two towers of `encoder_layers` layers, each with its projector, and a Llama of `language_layers` layers."""

    def __init__(
        self,
        encoder_width: int = 64,
        encoder_layers: int = 2,
        language_width: int = 128,
        language_layers: int = 4,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.vision_tower = ViTModel(
            ViTConfig(
                hidden_size=encoder_width,
                num_hidden_layers=encoder_layers,
                num_attention_heads=heads,
                intermediate_size=2 * encoder_width,
                image_size=8,
                patch_size=4,
                num_channels=1,
                initializer_range=0.06,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            ),
            add_pooling_layer=False,
        )
        self.vision_projector = nn.Linear(encoder_width, language_width)
        self.audio_tower = WhisperEncoder(
            WhisperConfig(
                d_model=encoder_width,
                encoder_layers=encoder_layers,
                encoder_attention_heads=heads,
                encoder_ffn_dim=2 * encoder_width,
                num_mel_bins=MELS,
                init_std=0.06,
                max_source_positions=AUDIO_TOKENS,
                dropout=0.0,
                attention_dropout=0.0,
                activation_dropout=0.0,
            )
        )
        self.audio_projector = nn.Linear(encoder_width, language_width)
        self.language_model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(VOCABULARY),
                hidden_size=language_width,
                intermediate_size=2 * language_width,
                num_hidden_layers=language_layers,
                num_attention_heads=heads,
                max_position_embeddings=SEQUENCE,
                initializer_range=0.06,
                use_cache=False,
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=None,
            )
        )

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        """Scans (B, 1, 8, 8) -> one feature a patch (B, IMAGE_TOKENS, D)."""
        patches = self.vision_tower(pixel_values=pixel_values).last_hidden_state[:, 1:]  # without the class token
        return self.vision_projector(patches)

    def get_audio_features(self, input_features: Tensor) -> Tensor:
        """Log-mel features (B, MELS, FRAMES) -> one feature every two frames (B, AUDIO_TOKENS, D)."""
        return self.audio_projector(self.audio_tower(input_features).last_hidden_state)

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, input_features: Tensor, labels: Tensor | None = None
    ) -> CausalLMOutputWithPast:
        """The language model's output for texts (B, S) whose placeholders are filled in; logits (B, S, V)."""
        embeddings = self.language_model.get_input_embeddings()(input_ids)  # (B, S, D)
        for token, features in (
            (IMAGE_ID, self.get_image_features(pixel_values)),
            (AUDIO_ID, self.get_audio_features(input_features)),
        ):
            places = (input_ids == token).unsqueeze(-1).expand_as(embeddings)
            embeddings = embeddings.masked_scatter(places, features.to(embeddings.dtype))
        return self.language_model(inputs_embeds=embeddings, labels=labels)


class Digits(L.LightningModule):
    """Trains a `DigitsModel`; logs the loss, and how many held-out answers are right in every character."""

    def __init__(
        self,
        encoder_width: int = 64,
        encoder_layers: int = 2,
        language_width: int = 128,
        language_layers: int = 4,
        learning_rate: float = 1e-3,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__()
        self.model = DigitsModel(encoder_width, encoder_layers, language_width, language_layers)
        self.learning_rate, self.warmup_steps = learning_rate, warmup_steps
        self.val_accuracy = MulticlassExactMatch(num_classes=len(VOCABULARY))

    def _run(self, batch: dict[str, Tensor]) -> Any:
        return self.model(batch["input_ids"], batch["pixel_values"], batch["input_features"], batch["labels"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean cross entropy of the answers' tokens."""
        loss = self._run(batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The answers (B, ANSWER_LENGTH), each token the likeliest one after the right tokens before it.

        An answer counts only if all its tokens are right. The count equals that of greedy decoding, because the two
        differ only after a wrong token.
        """
        outputs = self._run(batch)
        answers = outputs.logits[:, -ANSWER_LENGTH - 1 : -1].argmax(dim=-1)
        self.val_accuracy(answers, batch["labels"][:, -ANSWER_LENGTH:])
        self.log("val_loss", outputs.loss, prog_bar=True, sync_dist=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)
        return {"answers": answers}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW; the rate rises linearly for `warmup_steps`, then falls linearly to nothing at the last step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.01)
        steps = int(self.trainer.estimated_stepping_batches)

        def factor(step: int) -> float:
            return min((step + 1) / self.warmup_steps, (steps - step) / max(1, steps - self.warmup_steps))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
