#!/usr/bin/env bash
# Runs Lightning's own tests with MultimodalStrategy (tests/lightning_suite/in_place_of_ddp.py).
# Usage: scripts/lightning_tests.sh CLONE [PATH...]; CLONE is a clone of Lightning-AI/pytorch-lightning, and PATHs are
# those below tests/tests_pytorch, such as tuner or models/test_hooks.py. Without one: all that can be collected, but
# tests of other strategies.
set -euo pipefail
clone=$1
shift
[ $# -gt 0 ] || set -- accelerators callbacks checkpointing core demos deprecated_api graveyard helpers loggers loops \
  models overrides plugins profilers serve test_cli.py trainer tuner utilities
top=$(cd "$(dirname "$0")/.." && pwd)
version=$(python -c "import lightning; print(lightning.__version__)")
# a release of fixes alone may have no tag
tag=$(git -C "$clone" tag --sort=-v:refname | grep -Fx "$version" || git -C "$clone" tag --sort=-v:refname | grep -E "^${version%.*}\.[0-9]+$" | head -1)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git -C "$clone" archive "$tag" tests/tests_pytorch tests/legacy | tar x -C "$folder"
printf '[pytest]\naddopts = --disable-pytest-warnings\nmarkers =\n    cloud\n    flaky\n' >"$folder/pytest.ini"
echo "Lightning $version, tests of $tag"
cd "$folder/tests"
PYTHONPATH="$top:$top/tests:$folder/tests" python -m pytest -c "$folder/pytest.ini" --rootdir=. \
  -p lightning_suite.in_place_of_ddp -p no:cacheprovider --ignore=tests_pytorch/models/test_onnx.py "${@/#/tests_pytorch/}"
