"""What GPUs can do at most, by the name that ``torch.cuda.get_device_name`` gives them; a short name will do.

Figures are those of NVIDIA's data sheets: products in 16 bit without sparsity, and memory in gigabytes of 10^9 bytes. A
device lets programs use a little more than these. A part of a device (MIG) has no peaks here.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Peaks(NamedTuple):
    """What a device can do at most.

    Attributes:
        flops: of products in 16 bit, per second.
        memory_bandwidth: bytes per second that it reads or writes.
        memory: bytes.
    """

    flops: float
    memory_bandwidth: float
    memory: int


PEAKS = {
    "GB200": Peaks(2.5e15, 8e12, 186 * 10**9),
    "B200": Peaks(2.25e15, 8e12, 180 * 10**9),
    "GH200": Peaks(989.4e12, 4e12, 96 * 10**9),
    "H200": Peaks(989.4e12, 4.8e12, 141 * 10**9),
    "H200 NVL": Peaks(835.5e12, 4.8e12, 141 * 10**9),
    "H100": Peaks(989.4e12, 3.35e12, 80 * 10**9),
    "H100 NVL": Peaks(835.5e12, 3.9e12, 94 * 10**9),
    "H100 PCIe": Peaks(756e12, 2e12, 80 * 10**9),
    "H800": Peaks(989.4e12, 3.35e12, 80 * 10**9),
    "H20": Peaks(148e12, 4e12, 96 * 10**9),
    "A100": Peaks(312e12, 2e12, 80 * 10**9),
    "A100 40GB": Peaks(312e12, 1.555e12, 40 * 10**9),
    "A800": Peaks(312e12, 2e12, 80 * 10**9),
    "L40S": Peaks(362e12, 864e9, 48 * 10**9),
    "L40": Peaks(181e12, 864e9, 48 * 10**9),
    "L4": Peaks(121e12, 300e9, 24 * 10**9),
}
"""by name: that of all forms of a device that have no row of their own"""


def peaks_of(name: str) -> Peaks | None:
    """Return the peaks of a device: ``NVIDIA A100-SXM4-40GB`` is an ``A100 40GB``; None where they are not known."""
    words = _words(name)
    names = [known for known in PEAKS if _words(known) <= words and "mig" not in words]
    return PEAKS[max(names, key=len)] if names else None


def _words(name: str) -> set[str]:
    return set(re.findall("[a-z0-9]+", name.lower()))
