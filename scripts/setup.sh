#!/usr/bin/env bash
# Make (once) a virtual environment in .venv and install the project into it. Arguments: the extras, default "dev".
set -euo pipefail
cd "$(dirname "$0")/.."
if [ ! -x .venv/bin/python ]; then
  "${PYTHON:-python3}" -m venv .venv
fi
# torch first and by its exact version: that is what selects the build for this machine
.venv/bin/python -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' constraints.txt)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[${1:-dev}]"
