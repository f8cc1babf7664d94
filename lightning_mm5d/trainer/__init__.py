"""What knows Lightning: the session between setup and teardown, steps, logs, metrics and launchers."""
