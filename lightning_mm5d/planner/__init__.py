"""Planning before running: pictures of what a schedule will do.

It judges plans by simulation, on any machine; it knows nothing of the engine that runs them.
"""

from lightning_mm5d.planner.drawing import chrome_trace, draw

__all__ = ["chrome_trace", "draw"]
