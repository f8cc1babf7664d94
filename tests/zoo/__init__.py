"""Tiny random-weight models for parity tests, by name in `CASES`; families are imported only when built."""

from . import dual, handwritten, qwen, text, vision_language
from .case import Batch, Case, Items, TinyModule, apply_freeze

CASES: dict[str, Case] = {
    case.name: case for module in (handwritten, text, dual, vision_language, qwen) for case in module.CASES
}

__all__ = ["CASES", "Batch", "Case", "Items", "TinyModule", "apply_freeze"]
