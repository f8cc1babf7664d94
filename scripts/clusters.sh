#!/usr/bin/env bash
# Run the tests of the launchers of clusters, with Ray and mpi4py in an environment of their own that sees .venv.
# Open MPI and ip come from the system (apt-get install openmpi-bin iproute2); what is not installed is skipped.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh dev
venv=.venv-clusters
if [ ! -x "$venv/bin/python" ]; then
  .venv/bin/python -m venv "$venv"
  packages='import sysconfig; print(sysconfig.get_path("purelib"))'
  .venv/bin/python -c "$packages" >"$("$venv/bin/python" -c "$packages")/beside.pth"
fi
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "ray[train]" mpi4py
PYTHONPATH="$PWD" "$venv/bin/python" -m pytest -rs tests/clusters "$@"
