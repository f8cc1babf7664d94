"""Switches of kernels, said in `kernels` and `compile` of a modality.

ColossalAI and Cornstarch have them for a whole plugin, which here is for each of its modalities. A kernel that a
modality refuses beside its other fields is listed by name with the reason. Whether a model has what a kernel computes
is known later, and refused then.
"""

from __future__ import annotations

from lightning_mm5d.config.compiling import check_compile
from lightning_mm5d.config.features import check_features
from lightning_mm5d.tools.convert.knobs import Draft, Knob, ruled

KERNELS: tuple[Knob, ...] = (
    ruled("enable_fused_normalization", "modality.kernels", "`rms_norm`, for models with norms like Llama's",
          neutral=(False,)),
    ruled("enable_flash_attention", "modality.kernels", "`sdpa`, with a `cp_size` of 1: on GPUs flash attention where "
          "masks allow it. `flash_attention_2` is that of the package", neutral=(False,)),
    ruled("enable_jit_fused", "modality.compile", "`true`, without `sequence_parallel`: whole layers are compiled",
          neutral=(False,)),
)  # fmt: skip
"""In the order of the constructors."""


def convert_kernels(draft: Draft) -> None:
    """Say the switches in ours; call it when the modality has its other fields."""
    if draft.get("enable_flash_attention", False):
        choose_kernel(draft, "enable_flash_attention", "sdpa")
    if draft.get("enable_fused_normalization", False):
        choose_kernel(draft, "enable_fused_normalization", "rms_norm")
    name = "enable_jit_fused"
    if draft.get(name, False) and draft.accepts(name, lambda one: check_compile("", one), compile=True):
        draft.put(name, "modality.compile", True)


def choose_kernel(draft: Draft, name: str, kernel: str) -> None:
    """Add a kernel to those of the modality, which a knob asks for; or note why the modality refuses it."""
    chosen = [*draft.modality.get("kernels", ()), kernel]
    if draft.accepts(name, lambda one: check_features({"modalities": {"": one}}), kernels=chosen):
        draft.put(name, "modality.kernels", chosen)
