#!/usr/bin/env bash
# Start (or re-enter) a container on a machine with AMD GPUs; -h explains. Settings: docker/amd.env.
script=launch_amd.sh vendor=amd image=llm-train-bench:amd
build="docker build -t llm-train-bench:amd -f docker/Dockerfile.amd --build-arg GIT_SHA=\$(git rev-parse HEAD) ."
# shellcheck source=docker/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

find_gpus() {
    nodes=() n_mi300=0
    if [ -n "$dry" ] && [ ! -e "$root/dev/kfd" ]; then
        lack "no /dev/kfd"
        n_gpus=8
        nodes=("$root"/dev/dri/renderD{128..135})
        return
    fi
    [ -e "$root/dev/kfd" ] || die "no /dev/kfd: load AMD's driver (sudo modprobe amdgpu), or --cpu to go without"
    [ -r "$root/dev/kfd" ] && [ -w "$root/dev/kfd" ] ||
        die "/dev/kfd is not yours to use: sudo usermod -aG render,video $user_name, then log in again"
    # Not every render node is a GPU: an MI300X outside a virtual machine has eight. CPUs have no
    # SIMD units.
    local properties files
    nodes=()
    mapfile -t files < <(compgen -G "$root/sys/class/kfd/kfd/topology/nodes/*/properties" | sort -V)
    for properties in "${files[@]}"; do
        if grep -qs '^simd_count [1-9]' "$properties"; then
            ! grep -qs '^gfx_target_version 90402$' "$properties" || n_mi300=$((n_mi300 + 1))
            nodes+=("$root/dev/dri/renderD$(sed -n 's/^drm_render_minor //p' "$properties")")
        fi
    done
    if [ ${#nodes[@]} = 0 ]; then
        mapfile -t nodes < <(compgen -G "$root/dev/dri/renderD*" | sort -V)
    fi
    n_gpus=${#nodes[@]}
    [ "$n_gpus" -gt 0 ] || die "no GPU in /dev/dri: see rocm-smi, or --cpu to go without"
    if [ "$(cat "$root/proc/sys/kernel/numa_balancing" 2>/dev/null || echo 0)" != 0 ]; then
        echo "$script: NUMA balancing stalls AMD GPUs; off with: sudo sysctl kernel.numa_balancing=0" >&2
    fi
}

gpu_arguments() {
    args+=(--device /dev/kfd --security-opt seccomp=unconfined --cap-add SYS_PTRACE)
    if [ "$gpus" = all ]; then
        args+=(--device /dev/dri)
        # Advice for MI300X (gfx942). Other GPUs have other numbers of channels.
        if [ "$n_gpus" = 8 ] && [ "$n_mi300" = 8 ] && [ -z "${NCCL_MIN_NCHANNELS:-}" ]; then
            args+=(-e NCCL_MIN_NCHANNELS=112)
        fi
    else
        local wanted
        for wanted in ${gpus//,/ }; do
            [ "$wanted" -lt "$n_gpus" ] || die "--gpus $gpus: there are $n_gpus, numbered from 0" 2
            args+=(--device "${nodes[$wanted]#"$root"}")
        done
    fi
    if [ -n "$podman" ] && [ "$(id -u)" != 0 ]; then
        args+=(--group-add keep-groups)
    else
        # By number: the image may know the groups by other numbers, or not at all.
        local group
        while IFS= read -r group; do
            args+=(--group-add "$group")
        done < <(stat -c %g "$root/dev/kfd" ${nodes[@]+"${nodes[@]}"} 2>/dev/null | sort -un | grep -v '^0$' || true)
    fi
    args+=(--env-file "$repo/docker/amd.env")
}

main "$@"
