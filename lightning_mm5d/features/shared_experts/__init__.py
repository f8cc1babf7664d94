"""Ranks that share experts: which experts these are, and how tokens come to them and back: `Modality.ep_size`."""
