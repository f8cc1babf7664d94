"""What ``mm5d inspect --model`` prints: findings in a model, and a layout of it."""

from __future__ import annotations

import json
import logging
import sys
from argparse import Namespace
from pathlib import Path

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.schedule import name_of
from lightning_mm5d.tools.cli.configuration import prepare
from lightning_mm5d.tools.cli.job import load
from lightning_mm5d.tools.cli.model_findings import findings
from lightning_mm5d.tools.cli.named_model import named_model
from lightning_mm5d.tools.cli.terminal import show
from lightning_mm5d.tools.planner.inspect import as_json, holdings, report


def inspect_model(arguments: Namespace) -> None:
    """Print what is found in the model that `arguments` name.

    Raises:
        ConfigError: there is no such model, or the layout does not fit it.
    """
    for name in ("tp", "pp"):
        if getattr(arguments, name) < 2:
            rule = "It is a degree that is tried, of at least 2"
            raise ConfigError(f"--{name}", getattr(arguments, name), rule, f"Use --{name} 2, or leave it out")
    sys.path.insert(0, str(Path().resolve()))  # as `python -m` does
    logging.getLogger("lightning_mm5d").setLevel(logging.ERROR)  # what stays full is in the table
    job = None if arguments.config is None else load(prepare([arguments.config], None, (), sizes_will_do=True))
    module = named_model(arguments.model)
    found = findings(module, tp_size=arguments.tp, pp_size=arguments.pp)
    page, said = found.page(), found.as_json()
    if job is not None:
        plan = job.strategy.validate(module)
        name = name_of(job.strategy.schedule)
        page += report(plan, module, schedule=name, num_microbatches=job.strategy.usual_microbatches())
        said["places"] = as_json(holdings(plan, module), [])
    if arguments.json:
        print(json.dumps(said, indent=2))
    else:
        show(page)
