"""Planning before running: what a layout costs, and which one to choose, judged by simulation on any machine."""
