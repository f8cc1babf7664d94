"""Watches the ranks of a run: who waits where, who is lost, and which failure came first."""
