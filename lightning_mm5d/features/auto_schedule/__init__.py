"""The schedule ``auto``, which is searched for."""
