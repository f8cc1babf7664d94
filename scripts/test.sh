#!/usr/bin/env bash
# Set up and pass the tests: all, or with --quick those that start no processes and a few layouts on ranks.
# Other arguments go to pytest; given any, tests run one after the other.
# With COVERAGE=1 also measure the lines that all ranks run.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh dev
# the processes that tests start would compile all that they import, each again
unset PYTHONDONTWRITEBYTECODE
# half as many workers again as cores: ranks wait for each other, and as many as cores leave some idle
workers=$(($(getconf _NPROCESSORS_ONLN) * 3 / 2))
parallel=(-n "$((workers < 8 ? workers : 8))" --dist loadfile --no-loadscope-reorder)  # in the order of tests/conftest.py
# a test that hangs fails after ten minutes, with the stacks of its threads, and its worker is replaced
parallel+=(-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true)
case "${1:-}" in
  "") set -- "${parallel[@]}" ;;
  --quick) shift && set -- "${parallel[@]}" -m "(smoke or not processes) and not exhaustive" "$@" ;;
esac
if [ -z "${COVERAGE:-}" ]; then
  exec .venv/bin/python -m pytest "$@"
fi
.venv/bin/python -m coverage erase
.venv/bin/python -m coverage run -m pytest "$@"
.venv/bin/python -m coverage combine --quiet
.venv/bin/python -m coverage report --skip-covered
