#!/usr/bin/env bash
# Every formatter and linter over the tree, from the environment given (default .venv); exit 1 if any complains.
#   tools/lint.sh [VENV]
set -u
cd "$(dirname "$0")/.." || exit 1
bin="${1:-.venv}/bin"
failed=0
step() {
  echo "== $*"
  "$@" || failed=1
}
step "$bin/ruff" format --check .
step "$bin/ruff" check .
step "$bin/mypy" --strict pyengine
mapfile -t sources < <(find csrc tests/core tests/cuda tests/cuda_emulation -name '*.cc' -o -name '*.h' -o -name '*.cu' \
  -o -name '*.cuh' | sort)
step "$bin/clang-format" --dry-run --Werror "${sources[@]}"
exit "$failed"
