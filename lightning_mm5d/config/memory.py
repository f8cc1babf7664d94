"""Checks of what a modality shares, computes again, moves and compresses. Imports no torch."""

from __future__ import annotations

from lightning_mm5d.config.communication import check_communication
from lightning_mm5d.config.errors import ConfigError, did_you_mean, one_of
from lightning_mm5d.config.modality import Modality


def check_memory(field: str, modality: Modality) -> None:
    """Refuse what is wrong whatever the model and the number of ranks.

    Args:
        field: path of the modality.
        modality: its sizes have passed their own checks.

    Raises:
        ConfigError: at the first field that cannot work.
    """
    _check_offload(f"{field}.offload", modality)
    _check_sharing(field, modality)
    _check_experts(field, modality)
    check_communication(f"{field}.communication_dtype", modality.communication_dtype)


def check_cached_features(field: str, modality: Modality, *, is_encoder: bool) -> None:
    """Refuse `cache_features` where one rank alone cannot say which features are missing.

    Ranks that share an encoder compute together, and a rank that finds features would leave the others waiting.

    Args:
        field: path of the modality.
        modality: its sizes have passed their own checks.
        is_encoder: whether it feeds the language model.

    Raises:
        ConfigError: it is no encoder, or its ranks share layers, sequences, experts or parameters.
    """
    said, where = modality.cache_features, f"{field}.cache_features"
    if said is None:
        return
    if not isinstance(said, str) or not said.strip():
        rule = "It is the folder in which features are kept"
        raise ConfigError(where, said, rule, "Use a path such as 'features/vision', or leave it unset")
    if not is_encoder:
        rule = "It keeps what a frozen encoder gives to the language model, and this modality is no such encoder"
        raise ConfigError(where, said, rule, "Leave it unset here")
    sizes = {"tp_size": modality.tp_size, "cp_size": modality.cp_size, "ep_size": modality.ep_size}
    for name, size in {**sizes, "pp_size": modality.num_cuts}.items():
        if size > 1:
            rule = f"Each rank looks features up by itself, and {name} has {size} ranks compute them together"
            raise ConfigError(where, said, rule, f"Use {name}=1, with dp_size for speed, or leave it unset")
    if modality.shared_stage == 3:
        rule = "Each rank looks features up by itself, and with zero_stage=3 ranks share the parameters of the encoder"
        raise ConfigError(where, said, rule, "Use offload='parameters' to save memory, or leave it unset")


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
    if modality.ep_size > 1 and "parameters" in modality.offloads:
        rule = "Experts that ranks share stay on their devices, and offload names parameters"
        raise ConfigError(f"{field}.ep_size", modality.ep_size, rule, "Leave out 'parameters', or ep_size")


_OFFLOADS = ("activations", "optimizer", "parameters")


def _check_offload(field: str, modality: Modality) -> None:
    said = modality.offload
    if said is None:
        return
    if not isinstance(said, str | list | tuple):
        rule = "It is a list of what is in host memory between its uses: activations, optimizer, parameters"
        raise ConfigError(field, said, rule, "Use ['activations'], or leave it unset")
    unknown = next((one for one in modality.offloads if one not in _OFFLOADS), None)
    if unknown is not None:
        rule = "What moves to host memory is activations, optimizer or parameters"
        raise ConfigError(field, said, rule, did_you_mean(str(unknown), _OFFLOADS))
    if "parameters" in modality.offloads and modality.reshard_after_forward:
        rule = "reshard_after_forward gathers parameters that ranks share, and those on the host are whole"
        raise ConfigError(field, said, rule, "Leave out 'parameters', or reshard_after_forward")
