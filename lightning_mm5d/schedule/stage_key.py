"""Keys of stages: a modality and a number."""

from __future__ import annotations


class StageKey(str):
    """Key of a stage, the string ``"vision.0"`` for stage 0 of the modality ``vision``.

    It is a string: tables, messages and JSON show it as it is, and it equals a plain string of the same text.

    Args:
        modality: name of the modality.
        number: index of the stage within the modality, from 0.
    """

    modality: str
    number: int

    def __new__(cls, modality: str, number: int) -> StageKey:
        key = super().__new__(cls, f"{modality}.{number}")
        key.modality, key.number = modality, number
        return key

    def __getnewargs__(self) -> tuple[str, int]:  # type: ignore[override]
        return self.modality, self.number

    @classmethod
    def parse(cls, text: str) -> StageKey:
        """Return the key for a string such as ``"vision.0"``, or `text` itself if it is a key.

        Raises:
            ValueError: `text` is not the name of a modality, a dot and a number.
        """
        if isinstance(text, cls):
            return text
        modality, dot, number = text.rpartition(".")
        if not dot or not modality or not number.isdecimal():
            raise ValueError(f"a stage is named by its modality and its number, as in 'vision.0', got {text!r}")
        return cls(modality, int(number))
