#!/usr/bin/env bash
# Everything that needs a GPU, in one run of under 8 minutes, without a network:
#
#     benchmarks/gpu_check.sh [--out FOLDER] [--wheels FOLDER] [--seconds N] [--installed] [--dry-run]
#
# Builds FreeToken, runs the tests of tests/gpu, then gpu_hybrid.py, then (while time is left) the
# kernels' own tests on the GPU. Needs Python with torch and triton, a C++20 compiler, and cmake,
# nanobind, pytest and the like; --wheels is where gpu_wheels.sh has put what may be missing.
#
#   --out        where results go (default: ./gpu_results): summary.txt, gpu_hybrid.md and
#                .json, tests.xml, and the logs
#   --seconds    stop beginning new things after so long (default: 470)
#   --installed  do not build: use the freetoken that Python finds
#   --dry-run    without a GPU: the tests are skipped, the benchmark goes through the motions
#
# A stage that fails or runs out of time does not keep the others from running. Exits with 1 then.
set -euo pipefail

cd "$(dirname "$0")/.."
out=gpu_results wheels='' total=470 installed='' dry=''
while [ $# -gt 0 ]; do
  case $1 in
    --out) out=$2; shift ;;
    --wheels) wheels=$2; shift ;;
    --seconds) total=$2; shift ;;
    --installed) installed=yes ;;
    --dry-run) dry=--dry-run ;;
    *) sed -n '2,18s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
  shift
done
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$work/site
export PYTHON=${PYTHON:-python3} out site wheels work dry
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=$work/triton
mkdir -p "$site"
: > "$out/summary.txt"
failed=()

say() { echo "$*" | tee -a "$out/summary.txt"; }

# stage NAME SECONDS FUNCTION: its output goes to NAME.log; the rest goes on if it fails.
stage() {
  local name=$1 limit=$2 left=$((total - SECONDS)) start=$SECONDS code=0
  if ((left < 20)); then
    say "$name: not begun, $total s were up"
    failed+=("$name")
    return
  fi
  ((limit > left)) && limit=$left
  timeout --kill-after=10 "$limit" bash -euo pipefail -c "$3" > "$out/$name.log" 2>&1 || code=$?
  case $code in
    0) say "$name: ok, $((SECONDS - start)) s" ;;
    124 | 137) say "$name: FAILED, stopped after $limit s" ;;
    *) say "$name: FAILED ($code), $((SECONDS - start)) s" ;;
  esac
  if ((code != 0)); then
    failed+=("$name")
    tail -n 15 "$out/$name.log" | sed 's/^/    /'
  fi
}

machine() {
  uname -srm
  grep -m1 'model name' /proc/cpuinfo || true
  echo "$(nproc) processors, $(free -g | awk '/^Mem:/ {print $2}') GiB"
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
  "$PYTHON" -c 'import sys, torch
try:
    import triton
    name = triton.__version__
except ImportError as error:
    name = str(error)
print("Python", sys.version.split()[0], "torch", torch.__version__, "triton", name)
print("GPU seen by torch:", torch.cuda.is_available())'
  [ -n "$dry" ] || "$PYTHON" -c 'import sys, torch
sys.exit(None if torch.cuda.is_available() else "torch sees no GPU: nothing here can be checked")'
}

# Of the wheels, those whose package this Python lacks.
packages() {
  [ -n "$wheels" ] || { echo "no --wheels"; return; }
  local missing
  mapfile -t missing < <("$PYTHON" - "$wheels" <<'PYTHON'
import importlib.metadata
import pathlib
import sys

for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    try:
        importlib.metadata.version(wheel.name.split("-")[0].replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        print(wheel)
PYTHON
)
  printf 'lacking: %s\n' "${missing[@]}"
  [ ${#missing[@]} -eq 0 ] || "$PYTHON" -m pip install -q --no-index --no-deps --target "$site" \
    "${missing[@]}"
}

# As a wheel; without scikit-build-core or pip by cmake alone.
build() {
  export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
  if "$PYTHON" -c 'import scikit_build_core' &&
    "$PYTHON" -m pip install -v --no-index --no-build-isolation --no-deps --target "$site" .; then
    return
  fi
  echo 'pip could not build it; trying cmake alone'
  cmake -S . -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$PYTHON")"
  cmake --build "$work/build"
  cmake --install "$work/build" --prefix "$site"
  cp -R python/freetoken "$site/"
}

# Several processes where xdist is there: most of the time goes into compiling kernels.
several() {
  "$PYTHON" -c 'import xdist' 2> /dev/null || return 0
  local processes=$(($(nproc) / 3))
  echo "-n $((processes < 1 ? 1 : processes > 6 ? 6 : processes))"
}

tests() {
  # shellcheck disable=SC2046  # words
  "$PYTHON" -m pytest -m gpu $(several) -p no:cacheprovider --durations=10 --junitxml="$out/tests.xml" \
    tests/gpu
}

hybrid() {
  "$PYTHON" benchmarks/gpu_hybrid.py $dry --time-limit "$hybrid_seconds" \
    --json "$out/gpu_hybrid.json" --markdown "$out/gpu_hybrid.md"
}

kernels() {
  if [ -n "$dry" ]; then
    echo 'a dry run: the ordinary tests run these under the interpreter'
    return
  fi
  # shellcheck disable=SC2046
  "$PYTHON" -m pytest $(several) -p no:cacheprovider --durations=10 tests/kernels/triton \
    tests/moe/test_device_cache.py tests/platforms/test_gpu_memory.py
}

export -f machine packages build several tests hybrid kernels

stage machine 60 machine
cat "$out/machine.log" >> "$out/summary.txt"
rm "$out/machine.log"
stage packages 60 packages
cat "$out/packages.log" >> "$out/summary.txt"
rm "$out/packages.log"
[ -n "$installed" ] || stage build 240 build
stage tests 200 tests
export hybrid_seconds=$((total - SECONDS - 25 < 230 ? total - SECONDS - 25 : 230))
if [ "$hybrid_seconds" -gt 0 ]; then
  stage hybrid $((hybrid_seconds + 20)) hybrid
else
  say 'hybrid: no time is left for it'
  failed+=(hybrid)
fi
stage kernels 200 kernels

if [ ${#failed[@]} -gt 0 ]; then
  say "FAILED: ${failed[*]}"
else
  say 'all stages: ok'
fi
if [ -e "$out/gpu_hybrid.md" ]; then
  sed -n '/^### Judged/,/^### Graph against eager/p' "$out/gpu_hybrid.md"
fi
say "$SECONDS s in all; results in $out"
[ ${#failed[@]} -eq 0 ]
