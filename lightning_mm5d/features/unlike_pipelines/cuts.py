"""One list of stages for replicas whose pipelines cut the layers in different places.

A stage is what lies between two neighbouring cuts of any pipeline, so that all replicas have the same stages and each
rank of each of them runs one or more in a row. Whatever is said by stage then holds for all replicas: who owns a
parameter, what is sent on, and over which ranks a gradient is summed, which is layer by layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import cast

from lightning_mm5d.config.groups import PipelineTemplate, with_fields
from lightning_mm5d.config.modality import Modality


def cut(
    name: str,
    modality: Modality,
    count: int,
    balanced: Callable[[str, Modality, int], list[int]],
    from_template: Callable[..., list[int]],
) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Return the `common_stages` of a modality with `pipelines`.

    Args:
        name: of the modality.
        modality: with a list of pipelines.
        count: its layers.
        balanced: divides as many layers over the stages of equal pipelines.
        from_template: divides them as the template of a field says.
    """
    alone = with_fields(modality, pipelines=None, speeds=None, dp_size=None)
    return common_stages(
        [
            from_template(f"modalities.{name}.pipeline.pipelines[{index}]", template=one)
            if isinstance(one, PipelineTemplate)
            else balanced(name, replace(alone, pp_size=one), count)
            for index, one in enumerate(cast("list[int | PipelineTemplate]", modality.pipeline.pipelines))
        ]
    )


def common_stages(pipelines: Sequence[Sequence[int]]) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """Return the number of layers of each stage, and for each pipeline the pipeline rank of each stage.

    Of 12 layers as ``[3, 3, 3, 3]`` and ``[4, 4, 4]`` the stages are ``[3, 1, 2, 2, 1, 3]``, on the pipeline ranks
    ``(0, 1, 1, 2, 2, 3)`` of the one and ``(0, 0, 1, 1, 2, 2)`` of the other.

    Args:
        pipelines: layers of each pipeline rank, in order; the sums are equal.
    """
    ends = [list(accumulate(sizes)) for sizes in pipelines]
    cuts = sorted({0, *(end for one in ends for end in one)})
    stages = [last - first for first, last in pairwise(cuts)] or [0]
    starts = cuts[: len(stages)]
    return stages, tuple(tuple(min(bisect_right(one, first), len(one) - 1) for first in starts) for one in ends)
