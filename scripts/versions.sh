#!/usr/bin/env bash
# Check the versions of Python that pyproject.toml claims.
#   bash scripts/versions.sh             fast tests on every version whose interpreter is found (gigabytes of torch each)
#   bash scripts/versions.sh 3.12        the same on one version
#   bash scripts/versions.sh --resolve   only that every dependency has a release for every version; seconds
set -euo pipefail
cd "$(dirname "$0")/.."
uv=.venv/bin/uv
[ -x "$uv" ] || bash scripts/setup.sh dev
claimed=(3.11 3.12 3.13)
fast=(tests/config tests/layout tests/schedule tests/plan tests/partition tests/tools/planner tests/data)

if [ "${1:-}" = --resolve ]; then
  for version in "${claimed[@]}"; do
    "$uv" pip compile --quiet --no-header --python-version "$version" -c constraints.txt --extra dev pyproject.toml -o /dev/null
    echo "Python $version: dependencies resolve"
  done
  exit
fi

missing=()
for version in "${@:-${claimed[@]}}"; do
  interpreter=$(ls "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python 2>/dev/null | tail -1 || true)
  if [ -z "$interpreter" ] && ! interpreter=$("$uv" python find --no-python-downloads "$version" 2>/dev/null); then
    missing+=("$version")
    continue
  fi
  venv=.venv-$version
  [ -x "$venv/bin/python" ] || "$uv" venv --quiet --python "$interpreter" "$venv"
  "$uv" pip install --quiet --python "$venv/bin/python" --find-links "${PIP_FIND_LINKS:-.}" -c constraints.txt -e ".[dev]"
  "$venv/bin/python" -m pytest "${fast[@]}"
  echo "Python $version: tests pass"
done
for version in "${missing[@]}"; do
  echo "Python $version: NOT TESTED, no interpreter of this version on this machine"
done
