#!/bin/sh
# What `finetune bench` measures on a host with several NVIDIA GPUs, in parts that each end within nine minutes:
#
#     OUT=results benchmarks/gpu_study.sh comm            # collectives at every world size, then settings at the largest
#     OUT=results benchmarks/gpu_study.sh dense 1,2       # the study's two models, its 50 runs, with and without peers
#     OUT=results benchmarks/gpu_study.sh lora 1,8        # LoRA r16 of 1.2 B, packs of 16,384 tokens
#     OUT=results benchmarks/gpu_study.sh large 1,8       # the same of 3 B, one run
#     OUT=results TRAIN=train.jsonl EVAL=test.jsonl benchmarks/gpu_study.sh parity 1,2 full QLoRA  # cases by name, or 22
#     OUT=results TRAIN=train.jsonl benchmarks/gpu_study.sh predictions 1,2 '^LoRA, packs of 16'  # advice against a run
#     OUT=results TRAIN=train.jsonl benchmarks/gpu_study.sh too-large       # advice on 20 B in full; 90 GB of disk
#     OUT=results TRAIN=train.jsonl benchmarks/gpu_study.sh too-large llama-11b  # too large for 80 GB
#
# GSM8K (question, answer), or rows like it, are TRAIN and EVAL. Cases that do not end in time are left out. `predictions`
# adds the models of `dense` where $OUT has that study with the same numbers.
# PYTHON=... names the interpreter. JSON, Markdown and, where matplotlib is installed, PNG go to $OUT.
set -eu
: "${OUT:?set OUT to the folder of the results}"
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
cd "$(dirname "$0")/.."
what=${1:-comm}
worlds=${2:-1,2}
name=$(echo "$worlds" | tr , -)
bench() { timeout 530 "${PYTHON:-python3}" -m finetune.bench "$@"; }

case $what in
comm)
    bench comm --json "$OUT/comm.json"
    # Fewer sizes, DDP's two bucket sizes among them: without peer access a large one takes many times as long.
    gpus=$("${PYTHON:-python3}" -c 'import torch; print(torch.cuda.device_count())')
    bench comm --settings --world-sizes "$gpus" --runs 3 --steps 30 --sizes 4096,262144,1048576,26214400,67108864 \
        --json "$OUT/comm-settings.json"
    bench compute --runs 3 --steps 30 --world-sizes "$gpus" --json "$OUT/compute.json"
    ;;
dense) bench study --models 258K,6.9M --world-sizes "$worlds" --runs 50 --out "$OUT/dense-$name" ;;
lora) bench study --models llama-1.2b --world-sizes "$worlds" --runs 3 --steps 20 --out "$OUT/lora-$name" ;;
large) bench study --models llama-3b --world-sizes "$worlds" --runs 1 --steps 20 --out "$OUT/large-$name" ;;
parity)
    shift && [ $# -eq 0 ] || shift  # what is left names cases; six side by side are as many as two GPUs gain by
    timeout 530 "${PYTHON:-python3}" -m benchmarks.parity_matrix --train "$TRAIN" --eval "$EVAL" --shape llama-1.2b \
        --cases "${@:-}" --world-sizes "$worlds" --jobs 6 --work "$OUT/scratch" --out "$OUT/parity-$name.jsonl"
    ;;
predictions)
    set -- --alone --train "$TRAIN" --world-sizes "$worlds" --work "$OUT/scratch" --cases "${3:-}" --out "$OUT/predictions-$name.json"
    [ ! -f "$OUT/dense-$name/study.json" ] || set -- "$@" --study "$OUT/dense-$name/study.json"
    timeout 530 "${PYTHON:-python3}" -m benchmarks.predictions "$@"
    ;;
too-large)
    CUDA_VISIBLE_DEVICES=0 timeout 530 "${PYTHON:-python3}" -m benchmarks.predictions --train "$TRAIN" --work "$OUT/scratch" \
        --too-large "${2:-llama-20b}" --out "$OUT/too-large.json"
    ;;
*)
    echo "gpu_study.sh takes comm, dense, lora, large, parity, predictions or too-large; given: $what" >&2
    exit 2
    ;;
esac
