#!/usr/bin/env bash
# Start (or re-enter) a container on a machine with AMD GPUs; -h explains. Settings: docker/amd.env.
script=launch_amd.sh vendor=amd image=llm-train-bench:amd older_image=llm-train-bench/amd
build="docker build -t llm-train-bench:amd -f docker/Dockerfile.amd --build-arg GIT_SHA=\$(git rev-parse HEAD) ."
# shellcheck source=docker/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

find_gpus() {
    [ -e "$root/dev/kfd" ] || lack "no /dev/kfd: load AMD's driver (sudo modprobe amdgpu), or --cpu to go without"
    if [ "$(cat "$root/proc/sys/kernel/numa_balancing" 2>/dev/null)" = 1 ]; then
        echo "$script: NUMA balancing stalls AMD GPUs; off with: sudo sysctl kernel.numa_balancing=0" >&2
    fi
}

gpu_arguments() {
    local group n_mi300
    args+=(--device /dev/kfd --device /dev/dri --security-opt seccomp=unconfined --cap-add SYS_PTRACE)
    args+=(--env-file "$repo/docker/amd.env")
    n_mi300=$(cat "$root"/sys/class/kfd/kfd/topology/nodes/*/properties 2>/dev/null | grep -cx 'gfx_target_version 90402' || true)
    if [ "$gpus" != all ]; then
        args+=(-e "ROCR_VISIBLE_DEVICES=$gpus")
    elif [ "$n_mi300" = 8 ]; then
        args+=(-e NCCL_MIN_NCHANNELS=112) # advice for MI300X: other GPUs have other numbers of channels
    fi
    if [ -n "$podman" ] && [ -n "$rootless" ]; then
        args+=(--group-add keep-groups)
        return
    fi
    # By number: the image may know the groups by other numbers, or not at all.
    for group in $(stat -c %g "$root/dev/kfd" "$root"/dev/dri/renderD* 2>/dev/null | sort -u); do
        args+=(--group-add "$group")
    done
}

main "$@"
