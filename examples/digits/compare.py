"""Say how far two runs' losses are apart; exit with 1 if the first steps differ by more than rounding does.

    python examples/digits/compare.py runs/digits/losses.csv runs/digits_one_process/losses.csv

Judges only the first `--steps` steps. Another layout adds the same numbers in another order, and training amplifies the
rounding. Measured: four processes against one were at most 3e-6 (relative) apart over 50 steps and 2e-4
over 100; beyond 150, where the losses near zero, each run is on a path of its own to the same accuracy. One
process with each batch in four pieces is as far from one with whole batches; in float64 ten times less at first.

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
    """|a - b| / |b| of each step; raises ValueError where the steps are not the same, or none."""
    if first.keys() != second.keys() or not first:
        raise ValueError(f"the files hold different steps, or none: {len(first)} and {len(second)} of them")
    return {step: abs(first[step] - second[step]) / abs(second[step]) for step in first}


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison and return the exit status."""
    parser = argparse.ArgumentParser(description="Compare the losses of two runs.")
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference")
    parser.add_argument("--steps", type=int, default=50, help="how many steps are judged")
    options = parser.parse_args(arguments)
    try:
        differences = relative_differences(read(options.first), read(options.second))
    except ValueError as error:
        parser.error(str(error))
    judged = {step: differences[step] for step in sorted(differences)[: options.steps]}
    worst = max(judged.values())
    print(f"first {len(judged)} of {len(differences)} steps: largest relative difference {worst:.2e}")
    return int(not all(difference <= options.tolerance for difference in judged.values()))  # NaN fails


if __name__ == "__main__":
    raise SystemExit(main())
