"""A parameter of other ranks gives its shape, or an error that names it: never a number, in no step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from features.toys import PAIR, PIPE, VISION, Layout, Run, Scenario, Toy, assert_same, outcomes, together, weights
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import RemoteParameterError
from lightning_mm5d.sharded.remote_value import Guard, Origin, is_remote, placeholder, settled


class Held(nn.Module):
    """A module whose `weight` other ranks hold."""

    def __init__(self, shape: tuple[int, ...] = (3, 4)) -> None:
        super().__init__()
        self.guard = Guard(lambda name: "rank 7 (vision.0)", self.parameters)
        self.weight = placeholder(nn.Parameter(torch.randn(shape)), Origin("weight", self.guard))
        self.real = nn.Parameter(torch.randn(shape))


def masked_write(w: Tensor) -> Tensor:
    found = torch.zeros(5, 4)
    found[torch.tensor([True, False, True, True, False])] = w
    return found


def write_through_a_view(w: Tensor) -> Tensor:
    found = torch.zeros(2, 3, 4)
    found[1].copy_(w)
    return found


def out_argument(w: Tensor) -> Tensor:
    found = torch.zeros(3, 4)
    torch.add(w.detach(), 1, out=found)
    return found


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient[0] * 2, gradient[0]


COMPUTED: dict[str, Callable[[Tensor], Any]] = {
    "a comparison": lambda w: (w > 0).double().mean(),
    "nan_to_num": torch.nan_to_num,
    "isnan": lambda w: w.isnan().sum(),
    "a norm": lambda w: w.norm(),
    "a sum of norms": lambda w: sum(x.norm() for x in (torch.ones(2), w)),
    "argmax": lambda w: w.argmax(),
    "an index": lambda w: torch.ones(9)[w.argmax()],
    "a mask": lambda w: torch.ones(3, 4)[w > 0],
    "where": lambda w: torch.where(w > 0, torch.ones(3, 4), torch.zeros(3, 4)),
    "an integer cast": lambda w: torch.zeros(3, 4) + w.long(),
    "linear": lambda w: F.linear(torch.ones(2, 4), w),
    "embedding": lambda w: F.embedding(torch.tensor([0, 2]), w),
    "matmul": lambda w: torch.ones(2, 3) @ w,
    "attention": lambda w: F.scaled_dot_product_attention(w, w, w),
    "expand": lambda w: w[None].expand(2, -1, -1),
    "transposed": lambda w: w.T,
    "data": lambda w: w.data,
    "detach": lambda w: w.detach().cpu(),
    "max along a dim": lambda w: w.max(dim=1).values,
    "unbind": lambda w: next(iter(w)),
    "a vector of parameters": lambda w: nn.utils.parameters_to_vector([torch.ones(2), w]),
    "foreach": lambda w: torch._foreach_norm([torch.ones(2), w])[1],
    "masked write": masked_write,
    "a write through a view": write_through_a_view,
    "an out argument": out_argument,
    "masked scatter": lambda w: torch.zeros(3, 4).masked_scatter(torch.ones(3, 4).bool(), w),
    "an autograd function": lambda w: Doubled.apply(w, torch.ones(3, 4, requires_grad=True)),
    "a dropped write": lambda w: w.data.fill_(1.0),
    "another number": lambda w: w.detach() * 0 + 1,
    "a deep copy": copy.deepcopy,
    "a checkpoint": lambda w: torch.utils.checkpoint.checkpoint(torch.exp, w, use_reentrant=False),
}
SHAPE_ALONE: dict[str, Callable[[Tensor], Any]] = {
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda w: w.new_zeros(2),
    "expand_as": lambda w: torch.ones(1, 4).expand_as(w),
    "type_as": lambda w: torch.ones(3).type_as(w),
    "to": lambda w: torch.ones(3).to(w),
    "a size": lambda w: torch.ones(w.shape[0], w.numel(), len(w), w.dim()),
    "dtype and device": lambda w: torch.ones(2, dtype=w.dtype, device=w.device),
}
LEAVES: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda w: w.norm().item(),
    "float": lambda w: float(w.sum()),
    "int": lambda w: int(w.argmax()),
    "a branch": lambda w: 1 if (w > 0).any() else 0,
    "a maximum": lambda w: max(w.sum(), w.norm()),
    "tolist": lambda w: w.tolist(),
    "numpy": lambda w: w.detach().numpy(),
    "an array": lambda w: np.asarray(w.detach()),
    "a range": lambda w: range(w.argmax()),
    "equal": lambda w: torch.equal(w, torch.ones(3, 4)),
    "allclose": lambda w: torch.allclose(w, torch.ones(3, 4)),
    "contains": lambda w: 1.0 in w,
    "a tensor of numbers": lambda w: torch.tensor([w.norm(), w.sum()]),
    "a pickle": pickle.dumps,
    "a format": lambda w: f"{w.norm():.3f}",
    "a pointer": lambda w: w.data_ptr(),
    "a storage": lambda w: w.untyped_storage(),
    "a backward": lambda w: w.sum().backward(),
    "another parameter": lambda w: nn.Parameter(torch.ones(3, 4)).detach().copy_(w),
    "an average": lambda w: torch.ones(3, 4).lerp_(w.detach(), 0.1),
    "averages": lambda w: torch._foreach_lerp_([torch.ones(3, 4)], [w.detach()], 0.1),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_whatever_is_computed_from_a_remote_parameter_is_remote(name: str) -> None:
    held = Held()
    held.guard.ends_here = False
    found = COMPUTED[name](held.weight)
    assert is_remote(found), type(found)
    assert settled(found, "a log") is found  # a stage before the last throws it away
    held.guard.ends_here = True
    with pytest.raises(RemoteParameterError, match=r"`weight`.*rank 7 \(vision.0\)"):
        settled(found, "the loss")


@pytest.mark.parametrize("name", SHAPE_ALONE)
def test_what_takes_its_shape_alone_is_a_plain_tensor(name: str) -> None:
    found = SHAPE_ALONE[name](Held().weight)
    assert type(found) is Tensor
    assert not found.isnan().any()


@pytest.mark.parametrize("name", LEAVES)
def test_no_number_comes_out_of_a_remote_parameter(name: str) -> None:
    held = Held()
    with pytest.raises(RemoteParameterError, match=r"full_state_dict"):
        LEAVES[name](held.weight)


def test_what_is_cut_out_between_remote_values_is_plain_again() -> None:
    held = Held()
    both = torch.cat([held.weight[:1], held.real])
    assert is_remote(both[:2])
    torch.testing.assert_close(both[1:], held.real)
    assert torch.stack([held.weight, held.real])[-1].requires_grad
    assert is_remote((both * 2)[1:])  # only moves are followed
    assert is_remote(torch.cat([(held.weight > 0).double(), held.real])[1:])


@pytest.mark.parametrize("ends_here", [True, False])
def test_no_step_writes_into_the_memory_of_a_parameter(ends_here: bool) -> None:
    held = Held()
    held.guard.ends_here = ends_here
    for memory in (held.real.data, held.real.detach()[1:], held.real.data.view(-1)[:12].view(3, 4)[1:]):
        with pytest.raises(RemoteParameterError, match="on another tensor"):
            memory.lerp_(held.weight.data[: len(memory)], 0.1)
    assert not held.real.isnan().any()
    assert is_remote(torch.zeros(3, 4).lerp_(held.weight.data, 0.1))


def test_modules_with_remote_parameters_move_train_and_copy() -> None:
    held = Held()
    optimizer = torch.optim.AdamW(held.parameters(), foreach=True)
    held.real.sum().backward()
    before = held.real.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(before, held.real)
    held.double()
    assert held.weight.dtype == torch.float64
    assert held.weight.untyped_storage if not is_remote(held.weight) else held.weight.stride() == (0, 0)
    held.load_state_dict({"weight": torch.ones(3, 4), "real": torch.ones(3, 4)})
    nn.init.ones_(held.weight)
    assert held.weight in {held.weight}
    assert "shape=(3, 4)" in repr(held.weight)
    with pytest.raises(RemoteParameterError):
        float(copy.deepcopy(held).weight.sum())
    with pytest.raises(RemoteParameterError):
        pickle.dumps(held)


# --- on ranks ---


class Penalty(Toy):
    """A penalty on the encoder's weights that comparisons or ``nan_to_num`` would hide, from step `first` on."""

    first = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.encoder.patch.weight
        loss = self.loss(batch)
        return loss + 0.01 * (weight > 0).double().mean() if batch_idx >= self.first else loss


class ValidatesByParts(Toy):
    """Its validation calls the parts of the encoder, which is cut at its boundary."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.encoder.patch(batch["images"])
        for layer in self.encoder.layers:
            hidden = layer(hidden)
        logits = self.decoder(batch["tokens"], self.encoder.projector(hidden).nan_to_num())
        self.log("val_loss", F.cross_entropy(logits, batch["label"]), sync_dist=True)


class ReturnsAFlag(Toy):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"logits": self(batch), "positive": self.encoder.patch.weight > 0}


class LogsANorm(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("norm", self.encoder.patch.weight.norm().nan_to_num())
        return loss


class EarlyStates(Toy):
    """From the second batch on, the loss uses the state after the first layer, which another stage computes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        states: list[Tensor] = []
        hooks = [layer.register_forward_hook(lambda *a: states.append(a[2])) for layer in self.decoder.layers]
        loss = self.loss(batch)
        [hook.remove() for hook in hooks]
        return loss + (states[0] > 0).double().mean() if batch_idx else loss


class RightOnes(Toy):
    """Correct steps that take remote weights where the result is thrown away, and shapes anywhere."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        decoder = self.decoder
        scale = self.encoder.patch.weight.norm().clamp(max=1.0)  # before the layers, used where it is known
        features = self.encoder(batch["images"]) * 1.0
        hidden = F.embedding(batch["tokens"], decoder.embedding.weight)
        joined = torch.zeros(len(hidden), 6, 8, dtype=decoder.head.weight.dtype, device=decoder.head.weight.device)
        joined[:, :5] = hidden
        joined[torch.arange(6).eq(5).expand(len(hidden), -1)] = features
        for layer in decoder.layers:
            joined = layer(joined)
        loss = F.cross_entropy(decoder.head(decoder.norm(joined).mean(dim=1)), batch["label"])
        self.log("loss", loss, sync_dist=True)
        assert scale.dim() == 0
        return loss


def right(run: Run) -> Any:
    module = RightOnes()
    trainer = run.trainer()
    trainer.fit(module, run.training())
    return float(trainer.callback_metrics["loss"]), weights(module)


def validated(run: Run) -> Any:
    return run.trainer().validate(ValidatesByParts(), run.loader(8), verbose=False)


def test_correct_steps_train() -> None:
    """vision: rank 0; language: ranks 1-2 as stages."""
    fed = Layout({**PIPE.modalities, "vision": Modality(feeds=[0], **VISION)}, 3)
    found = outcomes(fed, right, validated)
    assert_same(found["right"].ranks[0], found["right"].one)
    assert_same(found["validated"].ranks[0], found["validated"].one)


def fitted(module: type[Toy], **options: Any) -> Scenario:
    def scene(run: Run) -> str:
        try:
            trainer = run.trainer(num_sanity_val_steps=0, **options)
            if module is ReturnsAFlag:
                trainer.predict(module(), run.loader(8))
            else:
                trainer.fit(module(), run.training(16), run.loader(8))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        return "no error"

    return scene


@pytest.mark.parametrize(
    ("module", "layout", "name"),
    [
        (Penalty, PAIR, "encoder.patch.weight"),
        (ReturnsAFlag, PAIR, "encoder.patch.weight"),
        (LogsANorm, PIPE, "encoder.patch.weight"),
        (EarlyStates, PIPE, "decoder."),
    ],
)
def test_no_step_keeps_what_depends_on_a_remote_parameter(module: type[Toy], layout: Layout, name: str) -> None:
    """vision: rank 0; language: rank 1, or ranks 1-2 as stages."""
    last = together(layout, fitted(module))[-1]
    assert last.startswith("RemoteParameterError"), last
    assert f"`{name}" in last
