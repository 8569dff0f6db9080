#!/usr/bin/env bash
# All that a GPU has to show, most important first, in less than nine minutes:
#   lab/benchmarks/gpu_all.sh FOLDER            a log and, where the job writes one, a JSON file per job; jobs.jsonl: how each ended
#   lab/benchmarks/gpu_all.sh FOLDER JOB...     these jobs alone, like tests or typed
#   SMALL=1                 every job at once, on small graphs, to see that it runs; kernels are then compiled for what follows
#   SECONDS_IN_ALL=520 PYTHON=python3
#   PACK=results.tgz        all of FOLDER in one file, written again after every job
#   PACKAGES=.packages      a folder of Python packages for a machine without pytest or the like, made where there is an index by
#                           pip install --no-deps --target .packages pytest pytest-xdist execnet pluggy iniconfig pygments
#                           packaging rich markdown-it-py mdurl shellingham typing_extensions typer==0.16.1 click==8.1.8
#   WORKERS=14              processes of the tests, where pytest-xdist is there: kernels are compiled by the host
# A job that fails or runs past its time is noted with the end of its log, and the next one runs, in a process of its own, since
# nothing works any more in a process whose kernel failed. Nothing needs to be installed. Kernels are kept from call to call.
set -uo pipefail
here=$(pwd)
out=${1:?a folder for the results}
shift
wanted=" $* "
mkdir -p "$out"
out=$(cd "$out" && pwd)
pack=${PACK:+$(realpath -m "$PACK")}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
packages=$(cd "$here" && realpath -m "${PACKAGES:-.packages}")
limit=${SECONDS_IN_ALL:-520}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/adahop-kernels} PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD/src:$PWD/lab/src${PYTHONPATH:+:$PYTHONPATH}
"$python" -c "import pytest, typer, rich, xdist" 2> /dev/null || export PYTHONPATH=$PYTHONPATH:$packages
: >> "$out/jobs.jsonl"

job() { # job NAME SECONDS COMMAND...
    local name=$1 most=$2 began=$SECONDS left=$((limit - SECONDS)) code=skipped
    shift 2
    [[ $wanted == *[![:space:]]* && $wanted != *" $name "* ]] && return
    if ((left > 5)); then
        # interrupted as by a user, so that pytest says what has failed until then
        timeout -s INT -k 10 $((most < left ? most : left)) "$@" > "$out/$name.log" 2>&1
        code=$?
    fi
    echo "{\"job\": \"$name\", \"exit\": \"$code\", \"seconds\": $((SECONDS - began))}" | tee -a "$out/jobs.jsonl"
    [[ $code == 0 || $code == skipped ]] || tail -n 12 "$out/$name.log" | cut -c 1-160
    [[ -z $pack ]] || { tar czf "$pack.$name" -C "$out" . 2> /dev/null; mv "$pack.$name" "$pack"; } # logs of others still grow
}

tests() { # tests NAME SECONDS FILE OPTIONS...
    local name=$1 most=$2 workers=()
    shift 2
    "$python" -c "import xdist" 2> /dev/null && workers=(-n "${WORKERS:-14}")
    job "$name" "$most" "$python" -m pytest -vv --tb=short -p no:cacheprovider --durations=40 "${workers[@]}" "$@"
}

epoch() { # epoch NAME SECONDS PARTS OPTIONS...
    local name=$1 most=$2 parts=$3
    shift 3
    job "$name" "$most" "$python" lab/benchmarks/gpu_epoch.py --parts "$parts" --out "$out/$name.json" "$@"
}

pyg() { # pyg NAME SECONDS WAYS OPTIONS...
    local name=$1 most=$2 ways=$3
    shift 3
    job "$name" "$most" "$python" lab/benchmarks/pyg_gpu.py --only "$ways" --out "$out/$name.json" "$@"
}

versions="
import importlib, platform
print('python', platform.python_version())
for name in 'torch triton numba numpy scipy torch_geometric pytest hypothesis typer rich adahop adahop_lab'.split():
    try:
        print(name, getattr(importlib.import_module(name), '__version__', '?'))
    except Exception as e:
        print(name, 'CANNOT BE IMPORTED:', e)"
if [[ -n ${SMALL:-} ]]; then
    job fingerprints 60 "$python" tests/fingerprints.py --cuda &
    job versions 60 "$python" -c "$versions" &
    epoch epochs 60 epochs --share 0.02 --captured --only "gcn uniform,gcn bs,gcn adahop,gat bs" &
    epoch million 60 million --share 0.01 --captured &
    epoch typed 60 typed --share 0.01 --captured &
    pyg pyg_device 60 device --small &
    WORKERS=${WORKERS:-8} tests tests 60 tests/ops/test_gpu.py tests/pyg/test_pyg_device.py -k "captured or probe_looks or gpu_trains or on_a_gpu" &
    wait
    exit
fi
job machine 20 nvidia-smi
job versions 60 "$python" -c "$versions"
# these make their data side by side and measure one at a time
export ADAHOP_TURN=$out/turn
epoch epochs 120 epochs --profile --captured --only "gcn uniform,gcn bs,gcn adahop,gat bs" &
epoch typed 180 typed --profile --captured &
epoch million 180 million --profile &
pyg pyg_device 180 device &
wait
job fingerprints_beside 60 "$python" tests/fingerprints.py --cuda &
tests tests 200 tests/ops/test_gpu.py tests/pyg/test_pyg_device.py tests/pyg/test_pyg_snapshot.py -k "not test_pyg_snapshot or gpu"
wait
job setup 45 "$python" -c "from adahop_lab.cli.bench import bench; bench()" setup --device cuda --graph synthetic:100000,2000000,100,10
epoch kernels 40 kernels,cached
epoch methods 60 methods
epoch eager 60 epochs --only "gcn uniform,gcn bs,gcn adahop"
epoch growth 60 growth
pyg pyg_cpu 90 cpu
