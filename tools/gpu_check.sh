#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: builds the CUDA core for it, runs its tests there, and times what the core is to reach.
#   tools/gpu_check.sh [--tiny] [VENV]
# VENV (default .venv) has pyengine installed with the extra [test]; where it has not, it is made here. --tiny takes the
# emulated library and small shapes: it shows that the check itself works. Ends with a short summary; exit 1 if a test
# failed or a result was wrong. Under six minutes on one H200.
set -euo pipefail
cd "$(dirname "$0")/.."
usage() {
  sed -n 3p "$0" >&2
  exit 2
}
tiny="" venv=.venv
for word in "$@"; do
  if [ "$word" = --tiny ]; then tiny=--tiny; elif [ -x "$word/bin/python" ]; then venv="$word"; else usage; fi
done
if ! "$venv/bin/python" -c 'import pyengine._core, pytest' 2>/dev/null; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet '.[test]'
fi
run="$(cd "$venv" && pwd)/bin/python"
[ -d /usr/local/cuda/bin ] && export PATH="$PATH:/usr/local/cuda/bin"
if ! command -v cmake >/dev/null || ! command -v ninja >/dev/null; then
  "$run" -m pip install --quiet --upgrade --target build-tools cmake ninja
  export PATH="$PWD/build-tools/bin:$PATH" PYTHONPATH="$PWD/build-tools"
fi

failed=0
if [ -n "$tiny" ]; then
  cmake -S . -B build-gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DPYENGINE_PYTHON=OFF >/dev/null
  cmake --build build-gpu --target pyengine_cuda_emulated | tail -1
  export PYENGINE_CUDA_LIBRARY="$PWD/build-gpu/tests/cuda_emulation/libpyengine_cuda_emulated.so"
else
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader
  cmake -S . -B build-gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DPYENGINE_PYTHON=OFF -DPYENGINE_CUDA=ON \
    -DCMAKE_CUDA_ARCHITECTURES=native >/dev/null
  cmake --build build-gpu --target pyengine_cuda | tail -1
  export PYENGINE_CUDA_LIBRARY="$PWD/build-gpu/csrc/cuda/libpyengine_cuda.so" PYENGINE_CUDA_TESTS=device
  "$run" -m pytest -q -x tests/cuda || failed=1
fi
"$run" tools/checks/cuda_coverage.py || failed=1
"$run" tools/checks/gpu_check.py $tiny || failed=1
[ "$failed" = 0 ] && echo "all checks passed" || echo "CHECKS FAILED, see above"
exit "$failed"
