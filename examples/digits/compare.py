"""Say how far two runs' losses are apart, step by step; exit with 1 if further than the tolerance.

    python examples/digits/compare.py runs/digits/losses.csv runs/digits_one_process/losses.csv

Reads the `losses.csv` that `train.py` writes. Refuses files whose steps differ.
"""

import argparse
import csv
from pathlib import Path


def read(path: Path) -> dict[int, float]:
    """The loss of each step."""
    with path.open(newline="") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}


def relative_differences(first: dict[int, float], second: dict[int, float]) -> dict[int, float]:
    """|a - b| / |b| of each step; raises ValueError where the steps are not the same."""
    if first.keys() != second.keys():
        raise ValueError(f"the files hold different steps: {len(first)} and {len(second)} of them")
    return {step: abs(first[step] - second[step]) / abs(second[step]) for step in first}


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison and return the exit status."""
    parser = argparse.ArgumentParser(description="Compare the losses of two runs.")
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference")
    options = parser.parse_args(arguments)
    try:
        differences = relative_differences(read(options.first), read(options.second))
    except ValueError as error:
        parser.error(str(error))
    worst = max(differences, key=differences.__getitem__)
    print(f"{len(differences)} steps, largest relative difference {differences[worst]:.2e} (step {worst})")
    return int(differences[worst] > options.tolerance)


if __name__ == "__main__":
    raise SystemExit(main())
