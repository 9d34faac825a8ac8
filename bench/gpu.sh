#!/usr/bin/env bash
# The engine on one GPU: what is there, the tests of tests/gpu, then bench/gpu.py. The tables come last.
#
#   bench/gpu.sh [--tests-only | --bench-only] [options of bench/gpu.py]
#   bench/gpu.sh --size 160m --minutes 8
#   bench/gpu.sh --device cpu --size tiny --batch 2 --sequence 64 --systems torch,polyreme2,fsdp2   # the same without a GPU
#
# Nothing is fetched and nothing is installed outside a temporary folder. Variables:
#   PYTHON   the interpreter that holds torch (python3)
#   WHEELS   a folder of wheels for packages that it lacks (.whl); they are unpacked for this run only
#   RESULTS  where the JSON, the tables and the tests' report go (bench/results)
# Exit status: 0, or 1 if a test or a system failed or a loss differs, or 2 if something that is needed is missing.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-.whl}
RESULTS=${RESULTS:-bench/results}
tests=1 bench=1 device=cuda
options=()
while [ $# -gt 0 ]; do
    case $1 in
        --tests-only) bench=0 ;;
        --bench-only) tests=0 ;;
        --out | --out=*) echo "the results go to the folder \$RESULTS ($RESULTS); set that instead of --out" >&2; exit 2 ;;
        --device) device=${2:-}; options+=("$1" "$device"); shift ;;
        --device=*) device=${1#*=}; options+=("$1") ;;
        -h | --help) sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'; exec "$PYTHON" bench/gpu.py --help ;;
        *) options+=("$1") ;;
    esac
    [ $# -gt 0 ] && shift
done
command -v "$PYTHON" >/dev/null || { echo "no $PYTHON here: set PYTHON to the interpreter that holds torch" >&2; exit 2; }

unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
if compgen -G "$WHEELS/*.whl" >/dev/null; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$unpacked" "$WHEELS"/*.whl || exit 2
fi
export PYTHONPATH="src:$unpacked${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1

"$PYTHON" - "$device" "$WHEELS" <<'CHECK' || exit 2
import importlib, importlib.util, platform, shutil, subprocess, sys
from importlib import metadata

device, wheels = sys.argv[1:]
print(f"python {platform.python_version()}, {platform.platform()}")
needed = {"torch": "torch", "transformers": "transformers", "pydantic": "pydantic", "pydantic_core": "pydantic-core",
          "annotated_types": "annotated-types", "typing_inspection": "typing-inspection", "numpy": "numpy", "yaml": "PyYAML",
          "filelock": "filelock", "rich": "rich", "safetensors": "safetensors", "psutil": "psutil"}
optional = {"pytest": "pytest", "pytest_timeout": "pytest-timeout", "deepspeed": "deepspeed", "triton": "triton"}
missing = []
for module, package in (needed | optional).items():
    if importlib.util.find_spec(module):
        print(f"  {package} {metadata.version(package)}")
    elif module in needed:
        missing.append(package)
    else:
        print(f"  {package}: not here, goes without")
if sys.version_info < (3, 11):
    sys.exit("Python 3.11 or later is needed")
if "torch" in missing:
    sys.exit(f"no torch in {sys.executable}: set PYTHON to the interpreter that holds it")
if missing:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    sys.exit(f"missing: {', '.join(missing)}. Where packages can be had, put their wheels into {wheels}/:\n"
             f"  python3 -m pip download --no-deps --only-binary=:all: --python-version {python} "
             f"--platform manylinux_2_17_x86_64 -d {wheels} {' '.join(missing)}")
import torch
numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if numbers < (2, 11):
    sys.exit(f"torch {torch.__version__} is too old: 2.11 or later is needed")
if device == "cuda":
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU; --device cpu takes the same path without one")
    free, total = torch.cuda.mem_get_info()
    print(f"  CUDA {torch.version.cuda}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}, "
          f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free; NCCL {'here' if torch.distributed.is_nccl_available() else 'not here'}")
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi", "--query-gpu=driver_version,clocks.sm,temperature.gpu,utilization.gpu", "--format=csv"])
if not (shutil.which("cc") or shutil.which("gcc")):
    print("  no C compiler: systems with +compile will fail")
CHECK

mkdir -p "$RESULTS"
name=$RESULTS/gpu-$device-$(date -u +%Y%m%d-%H%M%S)
status=0
verdict="tests: not asked for"
if [ $tests = 1 ]; then
    if "$PYTHON" -c "import pytest, pytest_timeout" 2>/dev/null; then
        echo "tests/gpu ..."
        "$PYTHON" -m pytest tests/gpu -q -p no:cacheprovider --durations=5 >"$name.tests.txt" 2>&1 || { status=1; cat "$name.tests.txt"; }
        verdict="tests: $(tail -n 1 "$name.tests.txt") ($name.tests.txt)"
    else
        verdict="tests: NOT RUN, pytest and pytest-timeout are needed"
        status=1
    fi
fi
tables=
if [ $bench = 1 ]; then
    tables=$("$PYTHON" bench/gpu.py ${options[@]+"${options[@]}"} --out "$name.json")
    ended=$?
    [ $ended -le "$status" ] || status=$ended
fi
echo
echo "$verdict"
[ -z "$tables" ] || printf '\n%s\n' "$tables"
exit $status
