#!/usr/bin/env bash
# Runs whose scores count and not their seconds, as many at a time as a machine with one GPU holds:
#   lab/benchmarks/gpu_scores.sh FOLDER DATA SECONDS      rows as they come, and a log per job, into FOLDER; DATA: a folder of .npz files
# A second call with the same FOLDER goes on. Where CUDA's multi-process service is there, processes share the GPU by it.
#   PYTHON=python3   GRAPHS=...   of never_worse.py, most wanted first
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
data=$(cd "$2" && pwd)
seconds=$3
python=${PYTHON:-python3}
graphs=${GRAPHS:-cora,ppi_rebuilt_labels,fb100_johnshopkins55,tolokers,amazon_computers,pubmed,blogcatalog_attr,flickr_small_attr,coauthor_physics}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=$PWD/src:$PWD/lab/src PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/adahop-kernels}
export CUDA_MPS_PIPE_DIRECTORY=/tmp/adahop-mps CUDA_MPS_LOG_DIRECTORY=/tmp/adahop-mps
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY"
nvidia-cuda-mps-control -d > "$out/mps.log" 2>&1 || echo "processes take turns on the GPU"

others="labor, k = 10; DropEdge; GAS; LMC"

job() { # job NAME SCRIPT OPTIONS...
    local name=$1
    shift
    timeout -s INT -k 5 $((seconds + 25)) "$python" "lab/benchmarks/$1" "${@:2}" --out "$out/$name.jsonl" > "$out/$name.log" 2>&1 &
}

job never_worse_gpu never_worse.py --data "$data" --device cuda --graphs "$graphs" --processes "${NEVER_WORSE:-9}" --seconds "$seconds"
job depth_gpu depth.py --data "$data" --device cuda --graphs amazon_computers --processes "${DEPTH:-2}" --seconds "$seconds"
job typed_scores_gpu typed_scores.py planted --models hgt --device cuda --processes "${TYPED:-2}" --seconds "$seconds"
job repeated_splits_gpu repeated_splits.py "$data/pubmed.npz" --device cuda --processes "${SPLITS:-2}"
job tuned_gpu never_worse.py --data "$data" --device cuda --graphs cora,tolokers,amazon_computers --runs 0 \
    --arms "$others" --processes "${TUNED_GPU:-1}" --seconds "$seconds"
job typed_pyg typed_pyg.py --data "$data" --processes "${PYG:-2}" --minutes "$((seconds / 60))"
job tuned_cpu never_worse.py --data "$data" --graphs cora,tolokers,fb100_johnshopkins55 --runs 0 \
    --arms "full batch; $others" --processes "${TUNED:-2}" --seconds "$seconds"
wait
echo quit | nvidia-cuda-mps-control > /dev/null 2>&1
wc -l "$out"/*.jsonl
