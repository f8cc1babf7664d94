#!/usr/bin/env bash
# Prove and measure on a machine with GPUs; writes docs/figures_gpu.md and docs/figures_gpu.json. At most 25 minutes.
#   bash scripts/gpu.sh                     all that this machine can do
#   bash scripts/gpu.sh transport kernels   some checks, or groups of them; --list prints them
#   bash scripts/gpu.sh --dry               every code path but the kernels, on a CPU; writes to build/gpu_dry
# It installs and downloads nothing. The Python is $PYTHON, or that of .venv, or python3. See docs/gpu.md.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTORCH_NVML_BASED_CUDA_CHECK=1

if ! "$python" -c "import torch, lightning, transformers, pytest, lightning_mm5d"; then
  cat >&2 <<HELP
$python lacks a package (the last line above names it). Set up .venv, which takes the CUDA build of torch on Linux:
  bash scripts/setup.sh dev
Without internet, download the wheels on another machine of this kind and carry the folder:
  python3 -m pip download -c constraints.txt -d wheels ".[dev]" "setuptools>=77" wheel
  PIP_NO_INDEX=1 PIP_FIND_LINKS="\$PWD/wheels" bash scripts/setup.sh dev
Another Python that has these packages will do as well: PYTHON=/path/to/python bash scripts/gpu.sh
HELP
  exit 2
fi
case " $* " in
  *" --dry "* | *" --list "* | *" --help "* | *" -h "*) ;;
  *)
    if ! "$python" -c "import sys, torch; sys.exit(not torch.version.cuda)"; then
      cat >&2 <<HELP
The torch of $python is built without CUDA. Install a build with it, of the version in constraints.txt:
  $python -m pip install --force-reinstall "$(grep '^torch==' constraints.txt)"
PyPI has the CUDA build for Linux; other CUDA versions are at https://download.pytorch.org/whl/ (--index-url).
HELP
      exit 2
    fi
    ;;
esac
exec "$python" -m benchmarks.gpu "$@"
