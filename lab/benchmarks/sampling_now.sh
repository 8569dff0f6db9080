#!/usr/bin/env bash
# The table of docs/benchmarks.md: draws beside DGL on both graphs, with both fan-outs, with one and with two threads.
#   lab/benchmarks/sampling_now.sh [FILE]      rows as JSON lines, default lab/benchmarks/results/sampling_now.jsonl
#   GRAPHS="rmat:200000,10000000 rmat:1000000,50000000" SIZES="10,10 15,10,5" THREADS=1,2 ROUNDS=5 CLOCK=wall PYTHON=python
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-lab/benchmarks/results/sampling_now.jsonl}
tracked=graphsage:policy=tracked
methods=graphsage,bs,bs:update=true,$tracked:draw=systematic,$tracked:draw=systematic:update=true
methods+=,$tracked,$tracked:update=true,bs:draw=systematic,bs:draw=systematic:update=true
for graph in ${GRAPHS:-rmat:200000,10000000 rmat:1000000,50000000}; do
    for sizes in ${SIZES:-10,10 15,10,5}; do
        ${PYTHON:-python} -m adahop bench sampling --graph "$graph" --sizes "$sizes" --threads "${THREADS:-1,2}" \
            --rounds "${ROUNDS:-5}" --seconds 0.3 --clock "${CLOCK:-wall}" --methods "$methods" \
            --peers dgl:uniform,dgl:uniform:ids=int32 --json
    done
done > "$out"
