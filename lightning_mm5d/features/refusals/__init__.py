"""Code of users that ranks cannot run as one process does is refused."""
