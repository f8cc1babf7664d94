#!/usr/bin/env bash
# Set up and pass the tests; arguments go to pytest. With COVERAGE=1 also measure the lines that all ranks run.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh dev
if [ -z "${COVERAGE:-}" ]; then
  exec .venv/bin/python -m pytest "$@"
fi
.venv/bin/python -m coverage erase
.venv/bin/python -m coverage run -m pytest "$@"
.venv/bin/python -m coverage combine --quiet
.venv/bin/python -m coverage report --skip-covered
