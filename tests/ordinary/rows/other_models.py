"""Models of other kinds than the toy: recurrent, convolutional, with losses that layers keep for the step."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from features.toys import CLASSES, TOKENS, WIDTH, Encoder
from ordinary.uses import Ordinary, row

SECTION = "Other models"


class Recurrent(nn.Module):
    """A GRU of two layers over tokens, to each of which the image's features are added."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        states, _ = self.rnn(self.embedding(tokens) + features.unsqueeze(1))
        return self.head(states[:, -1])


class Stateful(nn.Module):
    """LSTMs that hand their state from layer to layer, beginning with the image's features."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        states, hidden = self.embedding(tokens), features[None].contiguous()
        cell = torch.zeros_like(hidden)
        for layer in self.layers:
            new, (hidden, cell) = layer(states, (hidden, cell))
            states = states + new
        return self.head(states[:, -1])


class Captioner(nn.Module):
    """An LSTM cell in a loop over tokens: logits of the next token [B, S, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        hidden, cell, logits = features, torch.zeros_like(features), []
        for step in range(tokens.shape[1]):
            hidden, cell = self.cell(self.embedding(tokens[:, step]), (hidden, cell))
            logits.append(self.head(hidden))
        return torch.stack(logits, 1)


class CrossAttention(nn.Module):
    """torch's `TransformerDecoder` over tokens, with the image's features as its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 4)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=features.dtype)
        states = self.decoder(self.embedding(tokens), features[:, None], tgt_mask=mask, tgt_is_causal=True)
        return self.head(states.mean(1))


class Convolutional(nn.Module):
    """Convolutions over pixels, with group norms and residuals: images [B, PIXELS] -> features [B, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 4, 3, padding=1)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU()) for _ in range(2)]
        )
        self.projector = nn.Linear(4, WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        states = self.stem(images[:, None])
        for layer in self.layers:
            states = states + layer(states)
        return self.projector(states.mean(-1))


class With(Ordinary):
    """The toy with other parts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(1)
        self.change()
        self.double()

    def change(self) -> None:
        """Put other parts in."""


@row(SECTION, "a decoder of two GRU layers")
class WithGru(With):
    def change(self) -> None:
        self.decoder = Recurrent()


@row(SECTION, "a list of LSTM layers that hand their state on")
class WithStates(With):
    def change(self) -> None:
        self.decoder = Stateful()


@row(SECTION, "a captioner: an `LSTMCell` in a loop over tokens")
class WithCell(With):
    def change(self) -> None:
        self.decoder = Captioner()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch)[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())


@row(SECTION, "`nn.TransformerDecoder` with the image's features as memory")
class WithMemory(With):
    def change(self) -> None:
        self.decoder = CrossAttention()


@row(SECTION, "an encoder of convolutions with group norms")
class WithConvolutions(With):
    def change(self) -> None:
        self.encoder = Convolutional()


@row(SECTION, "`F.ctc_loss` with lengths of inputs and targets")
class WithAlignment(With):
    def change(self) -> None:
        self.letters = nn.Linear(WIDTH, 16)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.decoder.embedding(batch["tokens"]) + self.encoder(batch["images"])[:, None]
        for layer in self.decoder.layers:
            hidden = layer(hidden)
        scores, count = self.letters(hidden).log_softmax(-1).transpose(0, 1), len(batch["label"])
        targets = batch["label"][:, None] + 1
        return F.ctc_loss(scores, targets, torch.full((count,), TOKENS), torch.full((count,), 1))


@row(SECTION, "preferences (DPO): a frozen reference, chosen and rejected texts in one batch")
class WithReference(With):
    def change(self) -> None:
        self.reference = copy.deepcopy(self.decoder).requires_grad_(False).eval()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        features = self.encoder(batch["images"])
        tokens, both = torch.cat([batch["tokens"], batch["tokens"].flip(1)]), torch.cat([features, features])
        labels = torch.cat([batch["label"]] * 2)[:, None]
        scores = self.decoder(tokens, both).log_softmax(-1).gather(1, labels)[:, 0]
        with torch.no_grad():
            before = self.reference(tokens, both).log_softmax(-1).gather(1, labels)[:, 0]
        chosen, rejected = (scores - before).chunk(2)
        self.log_dict({"margin": (chosen - rejected).mean()}, sync_dist=True, on_epoch=True)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


@row(SECTION, "a VAE: `torch.distributions`, a KL term whose weight grows with `self.global_step`")
class WithLatents(With):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        mean = self.encoder(batch["images"])
        latent = torch.distributions.Normal(mean, F.softplus(mean) + 1e-3)
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        divergence = torch.distributions.kl_divergence(latent, prior).sum(-1).mean()
        found = torch.distributions.Categorical(logits=self.decoder(batch["tokens"], latent.mean))
        self.log("entropy", found.entropy().mean(), sync_dist=True)
        return min(1.0, self.global_step / 3) * 0.1 * divergence - found.log_prob(batch["label"]).mean()


class Penalised(nn.Module):
    """A layer that keeps a penalty on what it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        added = self.linear(hidden)
        self.penalty = added.pow(2).mean((1, 2)).mean()
        return hidden + added


class WithPenalties(With):
    def change(self) -> None:
        for place in (1, 3):
            self.decoder.layers[place] = Penalised()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = F.cross_entropy(self(batch), batch["label"])
        return loss + 0.1 * sum(one.penalty for one in self.decoder.layers if isinstance(one, Penalised))


@row(SECTION, "layers keep auxiliary losses: `loss + sum(layer.penalty for layer in self.decoder.layers)`")
class KeptByLayers(WithPenalties):
    pass


@row(SECTION, "layers keep auxiliary losses, and the step calls the model twice")
class KeptTwice(WithPenalties):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch) + self.loss({**batch, "images": 0.5 * batch["images"]})
        self.log("train_loss", loss, sync_dist=True)
        return loss


@row(SECTION, "layers keep auxiliary losses that the step takes away: `layer.penalty = None`")
class TakenAway(WithPenalties):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = F.cross_entropy(self(batch), batch["label"])
        for place in (1, 3):
            loss = loss + 0.1 * self.decoder.layers[place].penalty
            self.decoder.layers[place].penalty = None
        return loss


@row(SECTION, "layers keep auxiliary losses, and `validation_step` calls the model twice")
class KeptInLockStep(WithPenalties):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        for scale in (0.5, 1.0):
            loss = self.loss({**batch, "images": scale * batch["images"]})
        self.log("val_loss", loss, sync_dist=True)


@row(SECTION, "the encoder keeps a penalty, and the step adds it: `loss + 0.1 * self.encoder.penalty`")
class KeptByEncoder(With):
    def change(self) -> None:
        class Own(Encoder):
            def forward(self, images: Tensor) -> Tensor:
                features = super().forward(images)
                self.penalty = features.abs().mean()
                return features

        self.encoder = Own()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch), batch["label"]) + 0.1 * self.encoder.penalty


@row(SECTION, "layers keep auxiliary losses under manual optimization")
class KeptByHand(WithPenalties):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("train_loss", loss, sync_dist=True)


@row(SECTION, "a validation that reads a vector which a layer keeps, one number for each sample")
class KeptRows(With):
    def change(self) -> None:
        class Own(Penalised):
            def forward(self, hidden: Tensor) -> Tensor:
                result = super().forward(hidden)
                self.rows = result.mean((1, 2))
                return result

        self.decoder.layers[1] = Own()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch) + self.decoder.layers[1].rows.mean(), sync_dist=True)


@row(SECTION, "the projector of the encoder is `torch.jit.script`")
class Scripted(With):
    def change(self) -> None:
        self.encoder.projector = torch.jit.script(self.encoder.double().projector)


@row(SECTION, "the encoder is `torch.jit.trace`")
class Traced(With):
    def change(self) -> None:
        self.encoder = torch.jit.trace(self.encoder.double(), torch.zeros(4, 6, dtype=torch.float64))
