#!/usr/bin/env bash
# Branch coverage of the modules that read what strangers wrote (checkpoint, config, tokenizer, template, request), as a
# table; exit 1 if any of them, or all branches together, are under 95 %. Commands that tests start count, too.
#   tools/checks/coverage.sh [VENV]      (default .venv; needs `pip install 'coverage>=7.10'` there)
set -euo pipefail
cd "$(dirname "$0")/../.."
python="$(realpath -s "${1:-.venv}")/bin/python"
"$python" -c 'import coverage' 2>/dev/null || { echo "coverage is not installed: $python -m pip install coverage" >&2; exit 2; }

modules=(
  checkpoint safetensors_header gguf_file gguf_checkpoint gguf_config gguf_tokenizer strict_json hub
  config config_values config_moe latent_config rope_config fp8 tensors
  tokenizer tokenizer_file detokenize template_file chat_template template_limits template_sandbox
  sampling steps generate batching scoring prefix_cache speculate chat
)
tests=(
  tests/unit/test_{strict_json,checkpoint,hub,config,config_families,rope,tensors,fp8,moe}.py
  tests/unit/test_{tokenizer,post_processor,chat_template,template_limits,stop_strings,sampling,sampling_params}.py
  tests/unit/test_{engine,requests,speculate,hub_download,gguf_from_safetensors}.py tests/property/test_text_property.py
  tests/robustness/test_{config_cases,config_must_load,malformed_folders,malformed_safetensors,rare_inputs,rare_text}.py
  tests/robustness/test_{report_text,malformed_gguf}.py tests/unit/test_{gguf,gguf_tokenizer,template_file,batching,scoring,logprobs,prefix_cache,chat}.py
)
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cat >"$work/rc" <<RC
[run]
branch = True
source = pyengine
data_file = $work/data
parallel = True
patch = subprocess
RC
# Traced, a test that measures its own time may be too slow: whether tests pass is not what is asked here.
"$python" -m coverage run --rcfile="$work/rc" -m pytest -q -p no:cacheprovider "${tests[@]}" | tail -n 1 || true
"$python" -m coverage combine --rcfile="$work/rc" --quiet
include="$(printf 'pyengine/%s.py,' "${modules[@]}")"
"$python" -m coverage json --rcfile="$work/rc" --include="$include" -q -o "$work/json"
"$python" - "$work/json" "${modules[@]}" <<'PY'
import json
import sys

LEAST = 95.0
files = {path.rsplit("/", 1)[1][:-3]: entry for path, entry in json.load(open(sys.argv[1]))["files"].items()}
absent = sorted(set(sys.argv[2:]) - set(files))
low = [f"{name}.py was not run" for name in absent]
print(f"{'module':<20} {'lines':>11} {'branches':>11} {'both':>7}   not reached")
totals = [0, 0, 0, 0]
for name in sys.argv[2:]:
    if name in absent:
        continue
    s = files[name]["summary"]
    counts = [s["covered_lines"], s["num_statements"], s["covered_branches"], s["num_branches"]]
    totals = [a + b for a, b in zip(totals, counts)]
    share = s["percent_covered"]
    missing = [*map(str, files[name]["missing_lines"]), *(f"{a}->{b}" for a, b in files[name]["missing_branches"])]
    lines, branches = f"{counts[0]}/{counts[1]}", f"{counts[2]}/{counts[3]}"
    print(f"{name:<20} {lines:>11} {branches:>11} {share:>6.1f}%   {' '.join(missing[:8])}")
    if share < LEAST:
        low.append(f"{name}.py: {share:.1f} %")
branches = 100 * totals[2] / totals[3]
print(f"{'all':<20} {totals[0]}/{totals[1]} lines, {totals[2]}/{totals[3]} branches: {branches:.1f} % of branches")
if branches < LEAST:
    low.append(f"branches of all: {branches:.1f} %")
if low:
    sys.exit(f"under {LEAST:g} %: " + "; ".join(low))
PY
