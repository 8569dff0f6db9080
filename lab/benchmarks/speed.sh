#!/usr/bin/env bash
# Every figure of speed and memory on lab/docs/speed.md, measured here and now; a quiet machine, please.
#   lab/benchmarks/speed.sh [FOLDER]      rows as JSON lines, default lab/benchmarks/results/speed
#   THREADS=1,2 ROUNDS=5 CLOCK=wall PPI=path/to/ppi.npz PYTHON=python
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-lab/benchmarks/results/speed}
python=${PYTHON:-python}
rounds=${ROUNDS:-5}
clock=${CLOCK:-wall}
threads=${THREADS:-1,2}
ppi=${PPI:-${ADAHOP_DATA:-data}/ppi_rebuilt_labels.npz}
mkdir -p "$out"

small=rmat:200000,10000000
large=rmat:1000000,50000000
for graph in $small $large; do
    for sizes in 10,10 15,10,5; do
        name=sampling-${graph#rmat:}-$sizes
        $python -m adahop bench sampling --graph "$graph" --sizes "$sizes" --threads "$threads" --rounds "$rounds" \
            --clock "$clock" --json > "$out/${name//,/_}.jsonl"
    done
done
for graph in star $large; do
    name=degrees-${graph#rmat:}
    $python -m adahop bench degrees --graph "$graph" --rounds "$rounds" --clock "$clock" --json > "$out/${name//,/_}.jsonl"
done
if [ -e "$ppi" ]; then
    for arch in residual plain; do
        $python -m adahop bench epoch --graph "$ppi" --arch $arch --threads "$threads" --rounds "$rounds" --clock "$clock" \
            --json > "$out/epoch-$arch.jsonl"
    done
fi
for arch in plain residual; do
    $python -m adahop bench inference --graph $large --arch $arch
done > "$out/inference.jsonl"
$python lab/benchmarks/tables.py "$out"
