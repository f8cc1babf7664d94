"""What published projects do with optimizers, modes and batches that are no tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from features.toys import WIDTH, Decoder, Encoder, Samples
from ordinary.rows.projects import OWN, SECTION
from ordinary.uses import Ordinary, Run, fitted, row

# --- models ---


class Mixing(Decoder):
    """Norms, scales, a residual and tokens' values between the layers, as in nanochat and its kin."""

    def __init__(self) -> None:
        super().__init__()
        count = len(self.layers)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(count))
        self.scales = nn.Parameter(torch.tensor([[1.0, 0.1]] * count))
        self.values = nn.ModuleDict({str(index): nn.Embedding(16, WIDTH) for index in range(1, count, 2)})

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        hidden = first = self.embedding(tokens) + features.unsqueeze(1)
        for index, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            hidden = self.scales[index, 0] * hidden + self.scales[index, 1] * first
            if str(index) in self.values:
                hidden = hidden + self.values[str(index)](tokens)
            hidden = hidden + 0.5 * layer(norm(hidden))
        return self.head(self.norm(hidden).mean(dim=1))


@row(SECTION, "scales, norms and embeddings between layers: `x = s[i, 0] * x + s[i, 1] * x0`, `x = x + layer(norm(x))`")
class Mixed(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.decoder = Mixing().double()


class Hooked(Ordinary):
    """A forward hook on each linear layer of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.features = {
            name: torch.empty(0, dtype=torch.float64)
            for name, module in self.encoder.named_modules()
            if isinstance(module, nn.Linear)
        }
        for name in self.features:
            self.encoder.get_submodule(name).register_forward_hook(self.keep(name))

    def keep(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, result: Tensor) -> None:
            self.features[name] = result

        return hook


@row(SECTION, "a penalty on features that forward hooks keep of the encoder: `self.features[name] = output`")
class Extractor(Hooked):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        penalty = sum(features.pow(2).sum() for features in self.features.values()) / len(batch["label"])
        self.log("penalty", penalty, sync_dist=True)
        return loss + 0.01 * penalty


@row(
    SECTION,
    "forward hooks count dims of what layers of the encoder give, in a dict, read in `on_train_epoch_end`",
)
class Dims(Hooked):
    def keep(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, result: Tensor) -> None:
            self.features[name] = result.ndim

        return hook

    def on_train_epoch_end(self) -> None:
        self.seen.append(dict(self.features))


# --- optimizers ---


@row(SECTION, "warm-up in `optimizer_step` by `optimizer.param_groups`, with clipping and two groups")
def warm(run: Run) -> dict[str, Any]:
    class Warm(Ordinary):
        def configure_optimizers(self) -> Any:
            decayed = [p for n, p in self.named_parameters() if p.ndim > 1]
            others = [p for n, p in self.named_parameters() if p.ndim <= 1]
            groups = [
                {"params": decayed, "weight_decay": 0.1, "scale": 1.0},
                {"params": others, "weight_decay": 0.0, "scale": 2.0},
            ]
            return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            factor = min(1.0, (self.trainer.global_step + 1) / 5)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * factor * group["scale"]
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            self.log("lr", optimizer.param_groups[0]["lr"])

    return fitted(run, Warm(), max_epochs=2, gradient_clip_val=0.5)


@row(SECTION, "clipping by group in `configure_gradient_clipping`: `clip_grad_norm_` of each part")
class ByGroup(Ordinary):
    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.encoder.parameters())}, {"params": list(self.decoder.parameters()), "lr": 0.05}]
        return torch.optim.SGD(groups, lr=0.1)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        for index, group in enumerate(optimizer.param_groups):
            norm = nn.utils.clip_grad_norm_(group["params"], 0.05 * (index + 1))
            self.log(f"norm_{index}", norm)


@row(SECTION, "adaptive clipping by a history of norms: `np.percentile`-like of a list in the module")
class AutoClip(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = torch.norm(torch.stack([p.grad.norm(2) for p in self.parameters() if p.grad is not None]), 2)
        self.history.append(total.item())
        limit = sorted(self.history)[len(self.history) // 10]
        nn.utils.clip_grad_norm_(self.parameters(), limit)
        self.seen.append(limit)
        self.log("grad/limit", limit)


@row(SECTION, "`ReduceLROnPlateau` stepped by hand in `on_validation_epoch_end` of a scheduler kept in an attribute")
class ByHand(Ordinary):
    def configure_optimizers(self) -> Any:
        made = torch.optim.SGD(self.parameters(), lr=0.1)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(made, patience=0, threshold=10.0)
        return made

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.plateau.step(self.trainer.callback_metrics["val_loss"])
            self.seen.append(self.optimizers().param_groups[0]["lr"])


@row(SECTION, "`on_validation_model_eval` and `on_validation_model_train` keep the encoder in eval")
class Modes(Ordinary):
    def on_validation_model_eval(self) -> None:
        self.eval()
        self.seen.append("eval")

    def on_validation_model_train(self) -> None:
        self.train()
        self.encoder.eval()
        self.seen.append([self.encoder.training, self.decoder.training])


@row(SECTION, "`train()` overridden: `def train(self, mode=True): super().train(mode); self.encoder.eval()`")
class Overridden(Ordinary):
    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.encoder.eval()
        return self

    def on_train_epoch_start(self) -> None:
        self.seen.append([self.encoder.training, self.decoder.training])


# --- batches ---


class Picture:
    """Like an image of PIL: no tensor."""

    def __init__(self, values: list[float]) -> None:
        self.values = values


class Pictures(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.samples = Samples(count)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        return {**sample, "images": [Picture(sample["images"].tolist())], "question": f"what is {index}?"}


def lists(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "images": [sample["images"] for sample in samples],
        "question": [sample["question"] for sample in samples],
        "tokens": torch.stack([sample["tokens"] for sample in samples]),
        "label": torch.stack([sample["label"] for sample in samples]),
        "ids": [sample["question"].split()[-1] for sample in samples],
    }


@row(SECTION, "images as lists of objects, made to tensors by `self.processor(batch)` in the step")
def pictures(run: Run) -> dict[str, Any]:
    class Reading(Ordinary):
        def processor(self, batch: Any) -> Any:
            values = [picture.values for pictures in batch["images"] for picture in pictures]
            return {**batch, "images": torch.tensor(values, dtype=self.dtype, device=self.device)}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert len(batch["question"]) == len(batch["tokens"])
            return super().training_step(self.processor(batch), batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(self.processor(batch), batch_idx)

    loaders = {
        "train_dataloaders": run.training(Pictures(32), collate_fn=lists),
        "val_dataloaders": run.loader(Pictures(16), collate_fn=lists),
    }
    return fitted(run, Reading(), data=loaders)


@row(
    SECTION,
    'answers by sample: `self.results.append({"question": q, "answer": a})`, written as JSON under `is_global_zero`',
    differs=OWN,
)
def answers(run: Run) -> dict[str, Any]:
    class Answering(Ordinary):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            images = torch.tensor([p.values for ps in batch["images"] for p in ps], dtype=self.dtype)
            logits = self({**batch, "images": images})
            for question, answer in zip(batch["question"], logits.argmax(-1).tolist(), strict=True):
                self.results.append({"question": question, "answer": answer})

        def on_validation_epoch_start(self) -> None:
            self.results: list[dict[str, Any]] = []

        def on_validation_epoch_end(self) -> None:
            self.seen.append(self.results)
            self.results = []

    module, trainer = Answering(), run.trainer()
    trainer.validate(module, run.loader(Pictures(16), collate_fn=lists), verbose=False)
    return {"seen": module.seen}


class OwnVlm(Ordinary):
    """A vision-language model of one's own around `LlamaForCausalLM`, with sound before the text of each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
        self.decoder = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=20))
        self.second, self.projector = Encoder(), nn.Linear(2 * WIDTH, WIDTH)
        self.double()

    def outputs(self, batch: Any) -> Any:
        embeds = self.decoder.get_input_embeddings()(batch["input_ids"])
        features = torch.cat([self.encoder(batch["images"]), self.second(batch["images"])], dim=-1)
        embeds = embeds.masked_scatter(batch["input_ids"].eq(19)[..., None], self.projector(features))
        sound = embeds.new_ones(len(embeds), 2, WIDTH)
        mask = F.pad(batch["attention_mask"], (2, 0), value=1)
        labels = torch.cat([batch["labels"].new_full((len(embeds), 2), -100), batch["labels"]], dim=1)
        return self.decoder(inputs_embeds=torch.cat([sound, embeds], 1), attention_mask=mask, labels=labels)

    def loss(self, batch: Any) -> Tensor:
        return self.outputs(batch).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found, labels = self.outputs(batch), batch["labels"]
        hits = found.logits[:, 1:-1].argmax(-1).eq(labels)[labels.ne(-100)].double().mean()
        self.log_dict({"val_loss": found.loss, "val_acc": hits}, sync_dist=True, batch_size=len(labels))


def texts(samples: list[Any]) -> dict[str, Tensor]:
    """Texts of unlike lengths; two in three begin with an image."""
    images, rows = [], []
    for index, sample in enumerate(samples):
        rows.append(sample["tokens"][: 2 + int(sample["label"])] + 1)
        if index % 3:
            images.append(sample["images"])
            rows[-1] = F.pad(rows[-1], (1, 0), value=19)
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    counts = ids.eq(19).sum(1)
    marks = {"attention_mask": ids.ne(0).long(), "labels": ids.masked_fill(ids.eq(0) | ids.eq(19), -100)}
    return {"input_ids": ids, **marks, "images": torch.stack(images), "num_images": counts}


@row(
    SECTION,
    "a model of one's own: two encoders, a projector that is made last, a prefix, `batch_size` in logs",
    tolerance=1e-6,
    differs={"replicas": "each replica's loss is a mean over its own label tokens, as under DDP"},
)
def own_vlm(run: Run) -> dict[str, Any]:
    loaders = {
        "train_dataloaders": run.training(collate_fn=texts),
        "val_dataloaders": run.loader(16, collate_fn=texts),
    }
    return fitted(run, OwnVlm(), data=loaders)
