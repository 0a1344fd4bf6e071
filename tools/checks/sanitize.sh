#!/usr/bin/env bash
# The core under sanitizers, built into build-asan or build-tsan.
#   tools/checks/sanitize.sh asan|tsan [--all] [VENV]
# asan: AddressSanitizer (with a red zone behind every tensor, arena and KV block) and UndefinedBehaviorSanitizer over
# the test programs of the core and over Python tests that use it. Leaks are looked for in the programs; in Python they
# are not, because the interpreter leaves objects behind on purpose.
# tsan: ThreadSanitizer over the test programs: the pool, programs, packing, files of tensors. No Python.
# Without --all a part of about three minutes on two cores, as .ci/run takes it.
set -euo pipefail
cd "$(dirname "$0")/../.."
usage() {
  sed -n 3p "$0" >&2
  exit 2
}
kind="${1:-}" all="" venv=.venv
[ $# -gt 0 ] && shift
for word in "$@"; do
  if [ "$word" = --all ]; then all=yes; elif [ -x "$word/bin/python" ]; then venv="$word"; else usage; fi
done
case "$kind" in
  asan) sanitizer=address python=ON ;;
  tsan) sanitizer=thread python=OFF ;;
  *) usage ;;
esac
venv="$(cd "$venv" && pwd)"
run="$venv/bin/python"
build="build-$kind"

# Build tools, where the machine or the environment has none.
if ! command -v cmake >/dev/null || ! command -v ninja >/dev/null || ! "$run" -c 'import pybind11' 2>/dev/null; then
  "$run" -m pip install --quiet --upgrade --target build-tools cmake ninja pybind11
  export PATH="$PWD/build-tools/bin:$PATH" PYTHONPATH="$PWD/build-tools"
fi
pybind=()
[ "$python" = ON ] && pybind=("-Dpybind11_DIR=$("$run" -m pybind11 --cmakedir)" "-DPython_EXECUTABLE=$run")
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O1 "-DPYENGINE_SANITIZE=$sanitizer" \
  "-DPYENGINE_PYTHON=$python" "${pybind[@]}" >/dev/null
cmake --build "$build" --target all core_bits core_faults pool_stress

export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1
"$build/core_faults"
if [ -n "$all" ]; then
  "$build/pool_stress" 20
  "$build/core_bits"
else
  "$build/pool_stress" 1
  "$build/core_bits" --few
fi
[ "$kind" = asan ] || exit 0

# The package with the core that was built here, and the runtime libraries in front of Python's own.
mkdir -p "$build/site"
rm -rf "$build/site/pyengine"
cp -r pyengine "$build/site/pyengine"
find "$build/site" -name '*.so' -delete
cp "$build"/*.so "$build/site/pyengine/"
root="$PWD/tests"
if [ -n "$all" ]; then # but for tests that preload libraries of their own, measure or limit memory, or start a browser
  tests=("$root" "--ignore=$root/unit/test_allocations.py" "--ignore=$root/unit/test_memory.py"
    "--ignore=$root/unit/test_memory_growth.py" "--ignore=$root/unit/test_report_browser.py"
    "--deselect=tests/robustness/test_report_requests.py::test_report_g12_memory_does_not_grow_with_tokens"
    "--deselect=tests/robustness/test_report_checkpoints.py::test_report_b22_a_file_larger_than_the_address_space_is_read"
    "--ignore=$root/robustness/test_io_faults.py" "--ignore=$root/robustness/test_core_faults.py"
    "--ignore=$root/robustness/test_process_faults.py" "--ignore=$root/unit/test_core_program.py")
else
  tests=("$root"/unit/test_{c_abi,hooks,moe,sampling,weights_cache}.py)
fi
preload="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so.6)"
cd "$build/site" # the first folder in which Python looks
export ASAN_OPTIONS=detect_leaks=0 PYTHONPATH="$PWD" LD_PRELOAD="$preload"
"$run" -c 'from pyengine import _core; assert "/site/" in _core.__file__, _core.__file__'
"$run" -m pytest -q -p no:cacheprovider -c "$root/../pyproject.toml" --rootdir "$root/.." "${tests[@]}"
