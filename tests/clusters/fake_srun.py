"""Stands in for SLURM's srun: starts the tasks of a job step on this machine, with the variables that SLURM sets.

It reads the size of the job from the variables that sbatch sets, and takes the options of `slurm.sbatch` alone. The
task that fails first ends the others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--kill-on-bad-exit", choices=("0", "1"), default="0")
    options, command = parser.parse_known_args()
    nodes, tasks = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
    running = []
    for rank in range(nodes * tasks):
        place = {"SLURM_PROCID": rank, "SLURM_NODEID": rank // tasks, "SLURM_LOCALID": rank % tasks}
        own = {"SLURM_NTASKS": str(nodes * tasks), **{name: str(value) for name, value in place.items()}}
        running.append(subprocess.Popen(command, env={**os.environ, **own}))
    failed = 0
    while any(process.poll() is None for process in running):
        codes = [process.returncode for process in running if process.returncode]
        if codes and not failed:
            failed = codes[0]
            time.sleep(5)  # as long as SLURM waits, about
            for process in running if options.kill_on_bad_exit == "1" else ():
                if process.poll() is None:
                    process.terminate()
        time.sleep(0.05)
    return failed or max(abs(process.returncode) for process in running)


if __name__ == "__main__":
    sys.exit(main())
