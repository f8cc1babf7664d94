#!/usr/bin/env bash
# Set up and run the main job: four processes learn to add a digit that they see to one that they hear.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh examples
exec .venv/bin/python examples/digits/train.py fit --config examples/digits/config.yaml "$@"
