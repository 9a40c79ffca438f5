#!/usr/bin/env bash
# One node of several: run this on every node with the same arguments. torchrun's options may stand first.
#   JOB_ID=k3vq9x NNODES=2 HEAD=10.0.0.1 docker/torchrun_node.sh train_fsdp.py configs/llama-3.1-8b.json
# JOB_ID       a random word, the same on all nodes; whoever knows it can join (docs/CLUSTER.md)
# NNODES       number of nodes
# HEAD         address of one node, where all nodes meet; PORT (29400) is the port there
# NODE         number of this node, 0 at HEAD: then the others wait for it, up to WAIT (900) seconds.
#              Without it start all within two minutes. Kubernetes' JOB_COMPLETION_INDEX serves as well
# GPUS         processes on this node; by default one per GPU
set -euo pipefail
if [ $# -lt 2 ] || [ -z "${NNODES:-}" ] || [ -z "${HEAD:-}" ] || [ -z "${JOB_ID:-}" ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
cd "$(dirname "$0")/.."
node=${NODE:-${JOB_COMPLETION_INDEX:-}} port=${PORT:-29400}
options=(--nnodes "$NNODES" --nproc-per-node "${GPUS:-gpu}"
    --rdzv-backend c10d --rdzv-id "$JOB_ID" --rdzv-endpoint "$HEAD:$port")
if [ -n "$node" ]; then
    # Names may resolve to an address that the node does not know as its own.
    options+=(--rdzv-conf "is_host=$([ "$node" = 0 ] && echo 1 || echo 0)")
    until [ "$node" = 0 ] || (exec 3<>"/dev/tcp/$HEAD/$port") 2>/dev/null; do
        if [ "$SECONDS" -ge "${WAIT:-900}" ]; then
            echo "torchrun_node.sh: nothing answers at $HEAD:$port after ${WAIT:-900} s; is node 0 up?" >&2
            exit 1
        fi
        sleep 1
    done
fi
# What gloo and NCCL open is on the interface towards HEAD alone.
route=$(ip -o route get "$HEAD" 2>/dev/null || true)
if [ "$NNODES" -gt 1 ] && [[ $route =~ \ dev\ ([^ ]+) ]] && [ "${BASH_REMATCH[1]}" != lo ]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-${BASH_REMATCH[1]}}
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-${BASH_REMATCH[1]}}
fi
# torchrun, with time to save after SIGTERM; ends with 75 if the run was saved and stopped on request.
exec python -m llm_train_bench.run.agent "${options[@]}" "$@"
