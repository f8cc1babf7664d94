"""Steps that pass several times through the model, use states of early layers, or look at values between and after.

Stages before the last throw away what they make of results of other ranks, and must not fail on it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, MulticlassAccuracy, MulticlassF1Score
from torchmetrics.wrappers import ClasswiseWrapper

from features.toys import (
    CLASSES,
    LANGUAGE,
    PAIR,
    TOKENS,
    TWINS,
    VISION,
    WIDTH,
    Decoder,
    Layout,
    Run,
    Toy,
    assert_same,
    figures,
    outcomes,
    together,
    weights,
)
from lightning_mm5d import Modality
from sweeps import swept

FOUR = Layout({"vision": Modality(pp_size=2, **VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 4)
"""vision: ranks 0-1 as stages; language: ranks 2-3 as stages"""
LONG = Layout(
    {"vision": Modality(colocate_with="language.0", **VISION), "language": Modality(pp_size=4, **LANGUAGE)}, 4
)
"""language: ranks 0-3 as stages; vision: rank 0"""
LAYOUTS = {"pair": PAIR, "twins": TWINS, "four": FOUR, "long": LONG}


class Head(nn.Module):
    """Fuses features and tokens without any list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(features + self.embedding(tokens).mean(1))))


class Deep(Decoder):
    """Returns the states after all layers, too."""

    def forward(self, tokens: Tensor, features: Tensor) -> Any:  # type: ignore[override]
        hidden = self.embedding(tokens) + features.unsqueeze(1)
        states = [hidden]
        for layer in self.layers:
            hidden = layer(hidden)
            states.append(hidden)
        return self.head(self.norm(hidden).mean(dim=1)), states


class Logged(Toy):
    """Logs the loss that `total` gives."""

    def total(self, batch: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.total(batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss


class Measured(Logged):
    """Updates and forwards metrics that check values, by themselves, in a collection and in a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.binary, self.f1 = BinaryAccuracy(), MulticlassF1Score(num_classes=CLASSES)
        self.several = MetricCollection([BinaryAccuracy(), BinaryAUROC()], prefix="of_")
        self.wise = ClasswiseWrapper(MulticlassAccuracy(num_classes=CLASSES, average=None))

    def measure(self, logits: Tensor, label: Tensor) -> None:
        first, is_first = logits[:, 0].sigmoid(), (label == 0).long()
        self.binary.update(first, is_first)
        self.several.update(first, is_first)
        self.wise.update(logits.softmax(1), label)
        self.f1(logits, label)
        for name, metric in (("binary", self.binary), ("f1", self.f1)):
            self.log(name, metric, on_step=False, on_epoch=True)

    def total(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self(batch)
        self.measure(logits, batch["label"])
        return F.cross_entropy(logits, batch["label"])

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.several.compute())
        self.log_dict(self.wise.compute())


class Flat(Measured):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.decoder: Any = Head().double()


class Steered(Flat):
    """Looks at the loss, as code that guards against bad batches does."""

    def total(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self(batch)
        loss = F.cross_entropy(logits, batch["label"])
        if not torch.isfinite(loss):
            raise ValueError("the loss is not finite")
        assert (logits.softmax(1) >= 0).all()
        self.worst = max(getattr(self, "worst", 0.0), loss.item())
        print(f"{float(loss):.3f}", logits.detach().numpy().argmax(1).tolist(), end="")
        return loss if loss.item() < 100 else loss * 0

    def on_train_epoch_end(self) -> None:
        pass


class Guarded(Steered):
    """The same with layers that are split."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Toy().decoder


class Twice(Measured):
    """Two passes through the model, as of pairs and of two views, with a metric between them."""

    def total(self, batch: dict[str, Tensor]) -> Tensor:
        one = self(batch)
        self.measure(one, batch["label"])
        self.between = 0.5
        other = self({**batch, "images": batch["images"] * self.between})
        return F.cross_entropy(other, batch["label"]) + F.mse_loss(one, other)


class FlatTwice(Flat):
    total = Twice.total


class EncodedTwice(Logged):
    """Two calls of the encoder for one pass, one after it, as FLAVA has them."""

    def total(self, batch: dict[str, Tensor]) -> Tensor:
        features = self.encoder(batch["images"])
        loss = F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])
        return loss + F.mse_loss(self.encoder(batch["images"].flip(1)), features)


class Supervised(Logged):
    """Losses of early layers, and of all hidden states."""

    scales: tuple[float, ...] = (1.0,)

    def __init__(self) -> None:
        super().__init__()
        self.decoder.__class__ = Deep

    def total(self, batch: dict[str, Tensor]) -> Tensor:
        loss, features = torch.zeros(()).double(), self.encoder(batch["images"])
        for scale in self.scales:
            logits, states = self.decoder(batch["tokens"], features * scale)
            loss = loss + scale * F.cross_entropy(logits, batch["label"])
            for index, state in enumerate(states[:-1]):
                early = self.decoder.head(self.decoder.norm(state).mean(1))
                loss = loss + 0.1 * (index + 1) * scale * F.cross_entropy(early, batch["label"])
        return loss


class SupervisedTwice(Supervised):
    scales = (1.0, 0.5)


class Normed(Logged):
    """Two passes through batch norms in all layers, in front of them and after, whose statistics count both."""

    def __init__(self) -> None:
        super().__init__()
        for layers, size in ((self.encoder.layers, WIDTH), (self.decoder.layers, TOKENS)):
            for layer in layers:
                layer.norm = nn.BatchNorm1d(size).double()
        self.before, self.after = nn.BatchNorm1d(WIDTH).double(), nn.BatchNorm1d(CLASSES).double()
        self.register_buffer("passes", torch.zeros(()).double())

    def one_pass(self, batch: dict[str, Tensor], scale: float) -> Tensor:
        self.passes += 1
        features = self.before(self.encoder(batch["images"] * scale))
        return self.after(self.decoder(batch["tokens"], features))

    def total(self, batch: dict[str, Tensor]) -> Tensor:
        one, other = self.one_pass(batch, 1.0), self.one_pass(batch, 0.3)
        return F.cross_entropy(one, batch["label"]) + F.mse_loss(one, other)


class Stream(nn.Module):
    """A layer of two streams: what is asked, and what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, query: Tensor, content: Tensor) -> tuple[Tensor, Tensor]:
        read = torch.tanh(self.mix(content))
        return query + read.mean(1), content + read


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList([Stream() for _ in range(4)])

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        query, content = features, self.embedding(tokens)
        for layer in self.layers:
            query, content = layer(query, content)
        return self.head(query)


class Decoding(Logged):
    """Decodes in validation: each pass asks the same, and reads the tokens that the passes before chose."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            self.decoder: Any = Reader().double()

    def total(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch), batch["label"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        tokens, features = batch["tokens"].clone(), self.encoder(batch["images"])
        for place in range(3):
            logits = self.decoder(tokens, features)
            tokens[:, place] = logits.argmax(-1) + 3
        self.log("val_loss", F.cross_entropy(logits, batch["label"]), sync_dist=True)


CASES = (
    Measured,
    Flat,
    Steered,
    Guarded,
    Twice,
    FlatTwice,
    EncodedTwice,
    Supervised,
    SupervisedTwice,
    Decoding,
    Normed,
)
FLAT = (Flat, Steered, FlatTwice)


def trained(run: Run) -> Any:
    found: dict[str, Any] = {}
    for case in CASES:
        if case in FLAT and run.layout in (FOUR, LONG):
            continue
        if case is Normed:
            if run.layout is TWINS:
                continue
            run = Run(run.layout, {**run.options, "num_microbatches": 1})
        module, trainer = case(), run.trainer(max_epochs=2)
        trainer.fit(module, run.training(), run.loader(8) if case is Decoding else None)
        found[case.__name__] = {"logged": figures(trainer), "weights": weights(module)}
    return found


@pytest.fixture(scope="module", params=swept(LAYOUTS, "twins", "four", "pair"))
def found(request: Any) -> Any:
    return outcomes(LAYOUTS[request.param], trained)["trained"]


def test_losses_metrics_and_weights_equal_one_process(found: Any) -> None:
    for rank, got in enumerate(found.ranks):
        for name, one in got.items():
            expected = found.one[name]
            logged = [key for key in expected["logged"] if not key.endswith("_step") and key != "loss"]
            for key in logged:
                assert_same(one["logged"][key], expected["logged"][key], 1e-6, f"{name} on rank {rank}: {key}")
            if rank == 0:
                assert_same(one["weights"], expected["weights"], where=name)


class Chained(Logged):
    """A second pass with what the first one gave."""

    def total(self, batch: dict[str, Tensor]) -> Tensor:
        features = self.encoder(batch["images"])
        first = self.decoder(batch["tokens"], features).mean(1, keepdim=True)
        return F.cross_entropy(self.decoder(batch["tokens"], features + first), batch["label"])


def refused(run: Run) -> str:
    try:
        run.trainer().fit(Chained(), run.training())
    except ValueError as error:
        return str(error)
    except RuntimeError as error:  # another rank failed first
        return str(error)
    return "it ran"


def test_a_pass_that_needs_the_results_of_the_one_before_is_refused() -> None:
    for told in together(FOUR, refused):
        assert "depends on what the pass before gave" in told
