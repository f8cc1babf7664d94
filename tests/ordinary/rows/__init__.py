"""The rows of the table by what they are about; importing this package registers all of them."""

from ordinary.rows import (  # noqa: F401
    built_in_callbacks,
    callback_hooks,
    combinations,
    copied_parts,
    data_kinds,
    data_lists,
    data_modules,
    differentiation,
    evaluation,
    from_docs,
    from_guides,
    guides_metrics,
    inside_hooks,
    logging_forms,
    losses,
    module_hooks,
    optimizers,
    other_models,
    projects,
    projects_training,
    put_anew,
    rarer_hooks,
    trainer_flags,
    tricks,
    weights_in_steps,
    whole_scripts,
    whole_scripts_losses,
)
from ordinary.uses import USES

__all__ = ["USES"]
