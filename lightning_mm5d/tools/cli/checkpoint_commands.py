"""What ``mm5d export`` and ``mm5d checkpoint show`` print and write."""

from __future__ import annotations

from argparse import Namespace

from lightning_mm5d.config.tables import Table
from lightning_mm5d.export.exported import export
from lightning_mm5d.export.summary import human, summary
from lightning_mm5d.tools.cli.terminal import show, warn


def export_checkpoint(arguments: Namespace) -> None:
    """Write a checkpoint in another format, and print the files."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # it would print whole configurations where a user's environment asks for more
    done = export(
        arguments.checkpoint,
        arguments.folder,
        format=arguments.format,
        module=arguments.module,
        config=arguments.config,
        max_shard_size=arguments.max_shard_size,
        dtype=arguments.dtype,
        weights_only=not arguments.unsafe,
    )
    table = Table.of(("file", "size"), [(name, human(size)) for name, size in done.files.items()])
    show([f"{done.name} is in {done.path}", table])
    warn(done.warnings)


def show_checkpoint(arguments: Namespace) -> None:
    """Print what a checkpoint holds."""
    show(summary(arguments.path, verify=arguments.verify, weights_only=not arguments.unsafe))
