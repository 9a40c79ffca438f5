#!/usr/bin/env bash
# Start (or re-enter) a container on a machine with NVIDIA GPUs; -h explains.
script=launch.sh vendor=nvidia image=llm-train-bench:nvidia
build="docker build -t llm-train-bench:nvidia -f docker/Dockerfile --build-arg GIT_SHA=\$(git rev-parse HEAD) ."
# shellcheck source=docker/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

toolkit="install it: https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html"

find_gpus() {
    if [ -n "$dry" ] && ! command -v nvidia-smi >/dev/null; then
        lack "no nvidia-smi"
        return
    fi
    command -v nvidia-smi >/dev/null ||
        die "no nvidia-smi: install NVIDIA's driver (sudo ubuntu-drivers install), or --cpu to go without"
    n_gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    [ "$n_gpus" -gt 0 ] || lack "nvidia-smi lists no GPU: see nvidia-smi, or --cpu to go without"
    local wanted
    for wanted in ${gpus//,/ }; do
        [ "$wanted" = all ] || [ "$wanted" -lt "$n_gpus" ] ||
            die "--gpus $gpus: there are $n_gpus, numbered from 0" 2
    done
    if [ -n "$podman" ]; then
        compgen -G "$root/etc/cdi/*" >/dev/null || compgen -G "$root/var/run/cdi/*" >/dev/null ||
            lack "podman has no description of the GPUs: sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml (no nvidia-ctk: $toolkit)"
    elif [[ $("$engine" info --format '{{json .Runtimes}}') != *nvidia* ]] &&
        ! command -v nvidia-container-runtime-hook >/dev/null; then
        lack "no NVIDIA Container Toolkit: $toolkit; then: sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
    fi
}

gpu_arguments() {
    if [ -n "$podman" ]; then
        local wanted
        for wanted in ${gpus//,/ }; do
            args+=(--device "nvidia.com/gpu=$wanted")
        done
    elif [ "$gpus" = all ]; then
        args+=(--gpus all)
    else
        args+=(--gpus "\"device=$gpus\"") # the quotes are docker's: without them a comma ends the value
    fi
}

main "$@"
