#!/usr/bin/env bash
# All that a GPU has to show, most important first, in less than nine minutes:
#   lab/benchmarks/gpu_all.sh FOLDER      a log and, where the job writes one, a JSON file per job; jobs.jsonl: how each ended
#   SECONDS_IN_ALL=520 PYTHON=python
# A job that fails or runs past its time is noted, and the next one runs. Kernels are compiled anew.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:?a folder for the results}
python=${PYTHON:-python}
limit=${SECONDS_IN_ALL:-520}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$out/kernels} PYTHONPATH=src:lab/src${PYTHONPATH:+:$PYTHONPATH}
: > "$out/jobs.jsonl"

job() { # job NAME SECONDS COMMAND...
    local name=$1 most=$2 began=$SECONDS left=$((limit - SECONDS)) code=skipped
    shift 2
    if ((left > 5)); then
        timeout -k 5 $((most < left ? most : left)) "$@" > "$out/$name.log" 2>&1
        code=$?
    fi
    echo "{\"job\": \"$name\", \"exit\": \"$code\", \"seconds\": $((SECONDS - began))}" | tee -a "$out/jobs.jsonl"
}

epoch() { # epoch NAME SECONDS PARTS OPTIONS...
    local name=$1 most=$2 parts=$3
    shift 3
    job "$name" "$most" $python lab/benchmarks/gpu_epoch.py --parts "$parts" --out "$out/$name.json" "$@"
}

pyg() { # pyg NAME SECONDS WAYS
    job "$1" "$2" $python lab/benchmarks/pyg_gpu.py --only "$3" --out "$out/$1.json"
}

job machine 20 nvidia-smi
job tests_steps 120 $python -m pytest -q -p no:cacheprovider --durations=20 tests/ops/test_gpu.py
job tests_pyg 60 $python -m pytest -q -p no:cacheprovider --durations=20 tests/pyg/test_pyg_device.py -k gpu
job fingerprints 40 $python tests/fingerprints.py --cuda
epoch typed 90 typed
epoch epochs 75 epochs --only "gcn uniform,gcn bs,gcn adahop,gat bs"
pyg pyg_device 80 device
job setup 45 $python -m adahop bench setup --device cuda --graph synthetic:100000,2000000,100,10
epoch kernels 40 kernels,cached
epoch methods 60 methods
epoch growth 60 growth
pyg pyg_cpu 90 cpu
