"""The command `mm5d`."""
