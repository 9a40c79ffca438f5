#!/usr/bin/env bash
# `make cluster-test`: the same scripts on engines that clusters have, for real, on this machine.
#   tests/cluster/run.sh [batch requeue preempted setup array skypilot]
# SLURM needs root and Debian's packages (slurm.sh). SkyPilot gets an environment in .venv-sky. "slurm" is all of SLURM.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) && cd "$here/../.." || exit 2
python=$PWD/${VENV:-.venv}/bin/python
PATH=$PWD/${VENV:-.venv}/bin:$PATH
out=$(mktemp -d) slurm=/tmp/llm-train-bench-slurm
trap '"$here/slurm.sh" stop >/dev/null 2>&1; rm -rf "$out"' EXIT
tiny=(configs/gpt2-tiny.json --device cpu --warmup-steps 1 --bsz 1 --seq-len 32 --output-dir "$out/runs")
two=(--nodes 2 --gpus-per-node=0 --ntasks-per-node=1) # of a machine without GPUs and with two cores

expect() { # what, pattern, file: a line of the file must match
    grep -qE -- "$2" "$3" && return
    echo "cluster-test: $1: no line matches: $2" >&2
    tail -n 25 "$3" >&2
    exit 1
}
state() { scontrol show job "$1" -o | grep -oE ' (JobState|Restarts|ExitCode)=[^ ]*' | tr -d '\n'; }
until_state() { # job, pattern
    for _ in $(seq 480); do
        # shellcheck disable=SC2053
        [[ $(state "$1") = $2 ]] && return
        sleep 0.25
    done
    echo "cluster-test: job $1 is $(state "$1"), not $2" >&2 && exit 1
}
at_step() { # run, number: until it has done so many steps
    for _ in $(seq 240); do
        [ "$(cat "$out/runs/$1/steps.jsonl" 2>/dev/null | wc -l)" -ge "$2" ] && return
        sleep 0.25
    done
}

batch() { # four ranks on two nodes
    sbatch -W -Q "${two[@]}" --ntasks-per-node=2 -o "$out/log" docker/slurm.sbatch train_fsdp.py "${tiny[@]}" \
        --n-steps 4 --dist-timeout 60 || expect sbatch 'rc 0' "$out/log"
    expect sbatch '^batch: 1 x 1 x 4 = 4 samples' "$out/log"
    expect sbatch '^ok: ' "$out/log"
}
goes_on() { # requeue, preempted or setup: the job ends, waits, and goes on where it was saved
    scontrol update partitionname=low GraceTime=60
    local id
    id=$(sbatch --parsable -o "$out/$1.log" "${two[@]}" docker/slurm.sbatch train_fsdp.py "${tiny[@]}" --n-steps 200 \
        --dist-timeout 60 --save-every 5000 --run-name "$1" --resume auto)
    if [ "$1" = setup ]; then until_state "$id" '*RUNNING*'; else at_step "$1" 50; fi
    if [ "$1" = requeue ]; then
        scontrol requeue "$id"
    else
        sbatch -Q -p high --exclusive -N2 -o "$out/high.log" --wrap 'srun hostname'
    fi
    until_state "$id" '*JobState=PENDING*'
    sleep 2 # within a second the node refuses the job: "Job credential revoked"
    scontrol update jobid="$id" StartTime=now # SLURM waits two minutes
    until_state "$id" '*JobState=COMPLETED*'
    expect "$1" '^ok: ' "$out/$1.log"
    [ "$1" = setup ] || expect "$1" "^goes on from step [0-9]+ of $1" "$out/$1.log"
}
array() {
    sbatch -W -Q --array=0-2%2 -N1 --exclusive -o "$out/array-%a.log" \
        --wrap "$python train.py ${tiny[*]} --n-steps 4 --run-name array\$SLURM_ARRAY_TASK_ID"
    for i in 0 1 2; do expect array '^ok: ' "$out/array-$i.log"; done
}
skypilot() { # its own check of the task file, without network
    if [ ! -x .venv-sky/bin/sky ]; then
        "$python" -m venv .venv-sky && .venv-sky/bin/pip install -q skypilot || exit 1
    fi
    sed 's/num_nodes/num_node/' docker/skypilot.yaml >"$out/wrong.yaml"
    HOME=$out .venv-sky/bin/python "$here/skypilot.py" docker/skypilot.yaml "$out/wrong.yaml" >"$out/log" 2>&1
    expect skypilot '^ok docker/skypilot.yaml: 2 nodes' "$out/log"
    expect skypilot '^refused .*wrong.yaml: .*num_node' "$out/log"
}

[ $# -gt 0 ] || set -- slurm skypilot
# shellcheck disable=SC2048 # the names have no spaces
for name in ${*/slurm/batch requeue preempted setup array}; do
    begin=$SECONDS
    case $name in
    skypilot) skypilot ;;
    *)
        [ -e "$slurm/pids" ] || "$here/slurm.sh" start "$slurm" || exit 1
        # shellcheck disable=SC1091
        . "$slurm/env"
        case $name in requeue | preempted | setup) goes_on "$name" ;; *) $name ;; esac
        ;;
    esac
    echo "cluster-test: $name: ok, $((SECONDS - begin)) s"
done
