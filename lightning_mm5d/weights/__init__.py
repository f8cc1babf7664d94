"""How a rank comes to its own weights without the full model."""
