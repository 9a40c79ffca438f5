#!/usr/bin/env bash
# Start (or re-enter) a container on a machine with NVIDIA GPUs; -h explains.
script=launch.sh vendor=nvidia image=llm-train-bench:nvidia older_image=llm-train-bench
build="docker build -t llm-train-bench:nvidia -f docker/Dockerfile --build-arg GIT_SHA=\$(git rev-parse HEAD) ."
# shellcheck source=docker/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

find_gpus() {
    local toolkit=https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html
    [[ $(nvidia-smi -L 2>/dev/null) = *GPU* ]] ||
        lack "nvidia-smi shows no GPU: install NVIDIA's driver (sudo ubuntu-drivers install), or --cpu to go without"
    if [ -n "$podman" ]; then
        compgen -G "$root/etc/cdi/*" >/dev/null || compgen -G "$root/var/run/cdi/*" >/dev/null ||
            lack "podman knows no GPUs: sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml ($toolkit)"
    elif [[ $("$engine" info --format '{{json .Runtimes}}' 2>/dev/null) != *nvidia* ]] &&
        ! command -v nvidia-container-runtime-hook >/dev/null; then
        lack "no NVIDIA Container Toolkit ($toolkit), or it waits for: sudo nvidia-ctk runtime configure --runtime=docker"
    fi
}

gpu_arguments() {
    local number
    if [ -n "$podman" ]; then
        for number in ${gpus//,/ }; do
            args+=(--device "nvidia.com/gpu=$number")
        done
    elif [ "$gpus" = all ]; then
        args+=(--gpus all)
    else
        args+=(--gpus "\"device=$gpus\"") # the quotes are docker's: without them a comma ends the value
    fi
}

main "$@"
