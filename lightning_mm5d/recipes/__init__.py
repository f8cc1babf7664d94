"""Ready LightningModules and LightningDataModules for people who write YAML alone."""
