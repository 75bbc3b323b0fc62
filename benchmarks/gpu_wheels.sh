#!/usr/bin/env bash
# Fetch the wheels that benchmarks/gpu_check.sh may miss on a machine without a network.
#
#     benchmarks/gpu_wheels.sh FOLDER [NAME ...]
#
# Without names: everything that building, the tests and the benchmark need beyond torch, triton and
# numpy. Pinned as in constraints.txt, for Linux on this kind of processor and PYTHON_VERSION
# (default: 3.12). gpu_check.sh --wheels FOLDER installs of them what the machine lacks.
set -euo pipefail

if [ $# -lt 1 ]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
folder=$1
shift
version=${PYTHON_VERSION:-3.12}
python=${PYTHON:-python3}
machine=$(uname -m)
here=$(cd "$(dirname "$0")" && pwd)

# The pins that hold for that version; what they bring along and constraints.txt leaves to pip.
pins=$("$python" - "$here/../constraints.txt" "$version" "$@" <<'PYTHON'
import re
import sys

path, version, *names = sys.argv[1:]
unwanted = "torch numpy ruff mypy import-linter grimp sentencepiece hf-xet networkx sympy".split()
also = [
    "pytest-xdist==3.8.0", "execnet==2.1.2", "iniconfig==2.3.0", "sortedcontainers==2.4.0",
    "shellingham==1.5.4", "mdurl==0.1.2", "annotated-doc==0.0.4",
]
asked = tuple(map(int, version.split(".")))
found = {}
for line in [*open(path), *also]:
    pin, _, marker = (part.strip() for part in line.split("#")[0].partition(";"))
    limit = re.search(r'python_version\s*(>=|<)\s*"([\d.]+)"', marker)
    newer = limit and asked >= tuple(map(int, limit[2].split(".")))
    if pin and (limit is None or newer == (limit[1] == ">=")):
        found[pin.split("==")[0]] = pin
unknown = [name for name in names if name not in found]
if unknown:
    sys.exit(f"no pin for {', '.join(unknown)}; expected names of constraints.txt")
print(*(found[name] for name in names or found if names or name not in unwanted))
PYTHON
)

platforms=(--platform any)
for minor in 39 35 34 31 28 27 26 24 17 12 5; do
  platforms+=(--platform "manylinux_2_${minor}_$machine")
done
platforms+=(--platform "manylinux2014_$machine" --platform "manylinux1_$machine")

mkdir -p "$folder"
# shellcheck disable=SC2086  # one word per pin
"$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp \
  --python-version "$version" "${platforms[@]}" -d "$folder" $pins
echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $(du -sm "$folder" | cut -f1) MiB, in $folder"
