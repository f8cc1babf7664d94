"""Which rank is where: one object owns all arithmetic about ranks, nodes and axes."""

from lightning_mm5d.layout.layout import Layout, Share
