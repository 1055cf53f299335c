#!/usr/bin/env bash
# Measures on the accelerator of this machine, in two commands that write into one folder:
#
#     experiments/on_device.sh right FOLDER    (at most 300 s: tests, and every experiment)
#     experiments/on_device.sh speed FOLDER    (at most 350 s: benchmarks, beside PyTorch)
#
# --tiny as the third argument shows on any CPU that both work. PYTHON names the interpreter. Packages
# that a machine without a network lacks are taken from wheels in .whl/. Afterwards, on any machine,
# `python -m experiments.on_device --pages --folder=FOLDER` writes the tables of the pages.
set -eu
cd "$(dirname "$0")/.."
if [ $# -lt 2 ]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
part=$1
folder=$2
shift 2
python=${PYTHON:-python3}
if ls .whl/*.whl >/dev/null 2>&1; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --target "$site" .whl/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export MPLBACKEND=Agg XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
"$python" -m experiments.on_device --part="$part" --folder="$folder" "$@"
