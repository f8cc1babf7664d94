"""What no run needs to train: the command `mm5d`, the planner, and converters of other systems' configurations."""
