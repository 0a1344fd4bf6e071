#!/usr/bin/env bash
# The core for aarch64, cross-compiled and run under qemu-user: every NEON object against the scalar one, bit for bit
# (tests/core/core_bits.cc), on CPUs with and without the dotprod and i8mm extensions, then the check of the ISA objects.
#   tools/checks/aarch64.sh [BUILD_DIR]        default: build/aarch64
# Needs cmake, ninja and Debian's packages g++-aarch64-linux-gnu and qemu-user-static (qemu-user is as good). About
# 7 minutes of CPU time. Exit 1 at the first failure.
set -euo pipefail
cd "$(dirname "$0")/../.."
build="${1:-build/aarch64}"
qemu=$(command -v qemu-aarch64-static || command -v qemu-aarch64) || qemu=""
for tool in cmake ninja aarch64-linux-gnu-g++ aarch64-linux-gnu-objdump "${qemu:-qemu-aarch64-static}"; do
  command -v "$tool" >/dev/null && continue
  echo "aarch64.sh: $tool is missing; expected cmake, ninja and the packages g++-aarch64-linux-gnu, qemu-user-static" >&2
  exit 1
done

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DPYENGINE_PYTHON=OFF
cmake --build "$build" --target core_bits

# on CPU ISA...: the test, on a CPU of which the core must say that it has these
on() {
  echo "== qemu -cpu $1"
  "$qemu" -L /usr/aarch64-linux-gnu -cpu "$1" "$build/core_bits" "${@:2}"
}
on cortex-a72 scalar neon
on neoverse-n1 scalar neon neon_dotprod
on max scalar neon neon_dotprod neon_i8mm
python3 tools/checks/isa_objects.py "$build"
