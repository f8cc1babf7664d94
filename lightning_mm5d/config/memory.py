"""Checks of what a modality shares. Imports no torch."""

from __future__ import annotations

from lightning_mm5d.config.errors import ConfigError, one_of
from lightning_mm5d.config.modality import Modality


def check_memory(field: str, modality: Modality) -> None:
    """Refuse what is wrong whatever the model and the number of ranks.

    Args:
        field: path of the modality.
        modality: its sizes have passed their own checks.

    Raises:
        ConfigError: at the first field that cannot work.
    """
    _check_sharing(field, modality)
    _check_experts(field, modality)


def _check_sharing(field: str, modality: Modality) -> None:
    stage, size = modality.zero_stage, modality.dp_shard_size
    if stage is not None and (isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= 3):
        near = min(max(stage, 0), 3) if isinstance(stage, int | float) and not isinstance(stage, bool) else 0
        rule = "It is 0 (nothing is shared), 1 (states of optimizers), 2 (gradients too) or 3 (parameters too)"
        raise ConfigError(f"{field}.zero_stage", stage, rule, f"The nearest is {int(near)}")
    if stage == 0 and (size or 1) > 1:
        rule = f"{size} ranks share one copy, and zero_stage=0 says that nothing is shared"
        raise ConfigError(f"{field}.dp_shard_size", size, rule, "Use zero_stage=1, 2 or 3, or leave it unset")
    reshards = modality.reshard_after_forward
    if not isinstance(reshards, bool):
        raise ConfigError(f"{field}.reshard_after_forward", reshards, "It is true or false", f"Use {bool(reshards)}")
    if reshards and modality.shared_stage != 3:
        rule = f"Only shared parameters are gathered, and zero_stage is {modality.shared_stage}"
        raise ConfigError(f"{field}.reshard_after_forward", reshards, rule, "Use zero_stage=3, or leave it unset")


def _check_experts(field: str, modality: Modality) -> None:
    within, tp_size = modality.expert_tp_size, modality.tp_size
    if within != 1 and (modality.ep_size == 1 or within != tp_size):
        rule = f"Each expert is divided as other layers are, over tp_size={tp_size} ranks, or not at all"
        if modality.ep_size == 1:
            rule = "With ep_size=1 experts are divided over tp_size ranks, as other layers are"
        fix = "Leave it unset" if modality.ep_size == 1 else f"Use {one_of(sorted({1, tp_size}))}"
        raise ConfigError(f"{field}.expert_tp_size", within, rule, fix)
