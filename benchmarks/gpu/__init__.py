"""What only a machine with GPUs can prove: checks that `bash scripts/gpu.sh` runs, each in a process of its own.

`checks.py` is the list. A check is a function of a `Machine` that yields `Row` objects, or raises `LackingError`. To
add one, write such a function and name it in the list. What it does on a GPU it also does in the dry mode, with small
sizes on the CPU: only the small functions of `Machine` differ.
"""
