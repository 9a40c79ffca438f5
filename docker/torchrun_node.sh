#!/usr/bin/env bash
# One node of several: run this on every node with the same arguments.
#   NNODES=2 HEAD=10.0.0.1 docker/torchrun_node.sh train_fsdp.py configs/llama-3.1-8b.json --bsz 1
# NNODES       number of nodes
# HEAD         address of one of them, where all meet; PORT (29400) is the port there
# GPUS         processes on this node; by default one per GPU
# MAX_RESTARTS how often all ranks start again, from the beginning, after one failed (0)
set -euo pipefail
if [ $# -lt 2 ] || [ -z "${NNODES:-}" ] || [ -z "${HEAD:-}" ]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
cd "$(dirname "$0")/.."
exec python -m torch.distributed.run \
    --nnodes "$NNODES" --nproc-per-node "${GPUS:-gpu}" --max-restarts "${MAX_RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-id "${JOB_ID:-llm-train-bench}" --rdzv-endpoint "$HEAD:${PORT:-29400}" \
    "$@"
