"""Checkpoints out again: as folders of Hugging Face, as adapters of PEFT, as files of plain Lightning, as a summary."""
