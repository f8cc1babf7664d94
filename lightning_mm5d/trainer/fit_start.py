"""Refuses an `on_fit_start` that changes the parameters of a module, which ranks have shared out before.

Lightning calls it after `Strategy.setup`. A module that resizes embeddings there, or adds tokens or adapters, has then
parameters that no rank holds.
"""

from __future__ import annotations

import functools

import lightning.pytorch as pl

from lightning_mm5d.config.errors import ConfigError, RemoteParameterError


def watch_fit_start(module: pl.LightningModule) -> None:
    """Check the module's parameters around its `on_fit_start`, once.

    Raises:
        ConfigError: from the hook, when it replaces, adds or removes parameters, or reads those of other ranks.
    """
    hook = module.on_fit_start
    before = _parameters(module)

    @functools.wraps(hook)
    def watched() -> None:
        vars(module).pop("on_fit_start", None)
        cause: RemoteParameterError | None = None
        try:
            hook()
        except RemoteParameterError as error:
            cause = error
        after = _parameters(module)
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        if cause is not None or changed:
            rule = "Ranks share the parameters out before on_fit_start, so it cannot resize, add or replace them"
            got = f"other parameters than before: {', '.join(changed[:4])}" if changed else "parameters of other ranks"
            fix = "Do it in configure_model, or in __init__ (resize_token_embeddings, added tokens and adapters too)"
            raise ConfigError("on_fit_start", got, rule, fix) from cause

    vars(module)["on_fit_start"] = watched


def _parameters(module: pl.LightningModule) -> dict[str, int]:
    return {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
