#!/usr/bin/env bash
# The CUDA core: compiled by nvcc without a warning, and the same files under the emulation, with the tests of tests/cuda.
#   tools/checks/cuda.sh [--all-targets] [VENV]
# Built into build-cuda. Without --all-targets for sm_90 and PTX alone, as .ci/run takes it: about three minutes on two
# cores. nvcc is the machine's, or else one of the package index (nvidia-cuda-nvcc, into build-tools). No GPU is used.
set -euo pipefail
cd "$(dirname "$0")/../.."
usage() {
  sed -n 3p "$0" >&2
  exit 2
}
targets=90 venv=.venv
for word in "$@"; do
  if [ "$word" = --all-targets ]; then targets=; elif [ -x "$word/bin/python" ]; then venv="$word"; else usage; fi
done
run="$(cd "$venv" && pwd)/bin/python"

# Build tools, where the machine or the environment has none.
if ! command -v cmake >/dev/null || ! command -v ninja >/dev/null; then
  "$run" -m pip install --quiet --upgrade --target build-tools cmake ninja
  export PATH="$PWD/build-tools/bin:$PATH" PYTHONPATH="$PWD/build-tools"
fi
nvcc="$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)"
if [ -z "$nvcc" ]; then
  echo "no nvcc on this machine: taking one from the package index" >&2
  "$run" -m pip install --quiet --upgrade --target build-tools 'nvidia-cuda-nvcc>=13,<14'
  nvcc="$(ls "$PWD"/build-tools/nvidia/cu13/bin/nvcc)"
fi

cmake -S . -B build-cuda -G Ninja -DCMAKE_BUILD_TYPE=Release -DPYENGINE_PYTHON=OFF -DPYENGINE_CUDA=ON \
  "-DCMAKE_CUDA_COMPILER=$nvcc" "-DCMAKE_CUDA_ARCHITECTURES=$targets" >/dev/null
cmake --build build-cuda --target pyengine_cuda pyengine_cuda_emulated 2>&1 | tee build-cuda/log
if grep -iE '\bwarning\b' build-cuda/log; then
  echo "tools/checks/cuda.sh: warnings above; expected none" >&2
  exit 1
fi

export PYENGINE_CUDA_LIBRARY="$PWD/build-cuda/tests/cuda_emulation/libpyengine_cuda_emulated.so"
"$run" tools/checks/cuda_coverage.py
"$run" -m pytest -q tests/cuda
