# shellcheck shell=bash
# Shared by launch.sh and launch_amd.sh, which source it. They set script, vendor, image, build, and
# the functions find_gpus (sets n_gpus, or fails with a message) and gpu_arguments (fills args).
set -euo pipefail
: "${script:?}" "${vendor:?}" "${image:?}" "${build:?}"

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
workdir=/workspace/llm-train-bench
root=${BENCH_TEST_ROOT:-} # tests put other /dev, /sys and /proc trees before the paths looked at

die() { # one line: the problem, then what helps
    echo "$script: $1" >&2
    exit "${2:-1}"
}

lack() { # what this machine has not: an error, but for a dry run, which only says it
    [ -n "$dry" ] || die "$@"
    echo "$script: not here: $1" >&2
}

usage() {
    cat <<EOF
Usage: docker/$script [OPTIONS] [COMMAND ...]

Starts a container with this repository, all GPUs, shared memory, RDMA devices and caches, as your own user,
and runs COMMAND in it (by default a shell). If the container runs already, COMMAND runs in it, with
its GPUs and directories, and ends when the container's first command ends; --name starts another.

  --gpus LIST      which GPUs: all (default), or numbers: 0,1
  --cpu            no GPUs, and the image llm-train-bench:cpu
  --image NAME     image (default $image; environment: BENCH_IMAGE)
  --name NAME      name of the container (default llm-train-bench-USER-$vendor)
  --output DIR     directory for results, instead of runs/ in the repository
  --mount HOST[:CONTAINER][:ro]  a file or directory of this machine, by default at its own path; repeatable
  --env NAME[=VALUE]  a variable for the container; NAME alone takes its value here; repeatable
  --env-file FILE  a file of NAME=VALUE lines; repeatable
  --cache DIR      compiled kernels and downloads, kept between runs (default ~/.cache/llm-train-bench)
  --engine NAME    docker or podman (default: the first there is)
  --dry-run        print the command line and stop
  -h, --help       this text

  docker/$script python train_fsdp.py configs/llama-70b-proxy.json --sac-freq 1/4

Build the image first: $build
EOF
}

absolute() { # macOS has no realpath -m
    realpath -m -- "$1" 2>/dev/null || case $1 in
    /*) echo "$1" ;;
    *) echo "$PWD/$1" ;;
    esac
}

add_mount() { # HOST[:CONTAINER][:ro], or die
    local text=$1 source target mode=""
    [[ $text != *:ro ]] || mode=,readonly
    text=${text%:ro}
    source=${text%%:*} target=${text#*:}
    [ -n "$source" ] || die "--mount $1: HOST is empty; is a variable unset?" 2
    [[ $source = /* ]] || source=$PWD/$source
    [[ $text = *:* ]] || target=$source
    [ -e "$source" ] || die "--mount $1: there is no $source" 2
    [[ $target = /* ]] || die "--mount $1: $target must be a whole path, as in HOST:/data" 2
    [[ $source$target != *[,:\"]* ]] || die "--mount $1: must be HOST[:CONTAINER][:ro], without comma or quote" 2
    mounts+=(--mount "type=bind,src=$source,dst=$target$mode")
}

add_variable() { # NAME[=VALUE]. No value shows in a command line, a log or --dry-run
    local name=${1%%=*} where
    where=${2:---env $name}
    [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || die "$where: must be NAME or NAME=VALUE" 2
    [[ $1 != *$'\n'* ]] || die "$where: the value has a line break; mount a file instead" 2
    if [[ $1 = *=* ]]; then
        pairs+=("$1") # nor reaches the engine's own environment
    elif [ -z "${!name+set}" ] || [[ $name != *[A-Z]* ]]; then # a small name may be this script's
        die "$where: $name is not set here; give NAME=VALUE" 2
    else
        named+=(-e "$name")
    fi
}

add_variables() { # of a file, as docker reads it: no quotes, no export
    [ -r "$1" ] && [ ! -d "$1" ] || die "--env-file $1: cannot be read" 2
    local line number=0
    while IFS= read -r line || [ -n "$line" ]; do
        number=$((number + 1)) line=${line%$'\r'}
        [[ $line =~ ^[[:space:]]*(#|$) ]] || add_variable "${line#"${line%%[![:space:]]*}"}" "--env-file $1: line $number"
    done <"$1"
}

parse() {
    gpus=all cpu="" dry="" engine="" output="" container=""
    mounts=() named=() pairs=() # what --mount, --env and --env-file ask for
    asked="" fixed="" # an image that was asked for; an option that a running container cannot follow
    cache="${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/llm-train-bench"
    while [ $# -gt 0 ]; do
        case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --dry-run) dry=1 ;;
        --cpu) cpu=1 ;;
        --gpus | --image | --name | --output | --cache | --engine | --mount | --env | --env-file)
            [ $# -ge 2 ] || die "$1 needs a value; see $script --help" 2
            case $1 in
            --gpus) gpus=$2 fixed=$1 ;;
            --output) output=$2 fixed=$1 ;;
            --cache) cache=$2 fixed=$1 ;;
            --image) asked=$2 ;;
            --name) container=$2 ;;
            --engine) engine=$2 ;;
            --mount) add_mount "$2" && fixed=$1 ;;
            --env) add_variable "$2" ;;
            --env-file) add_variables "$2" ;;
            esac
            shift
            ;;
        --)
            shift
            break
            ;;
        -*) die "$1: no such option; see $script --help" 2 ;;
        *) break ;;
        esac
        shift
    done
    command=("$@")
    if [ -n "$cpu" ]; then
        image=llm-train-bench:cpu vendor=cpu
        build="docker build -t llm-train-bench:cpu -f docker/Dockerfile.cpu ."
    fi
    asked=${asked:-${BENCH_IMAGE:-}}
    image=${asked:-$image}
    [[ $gpus =~ ^(all|[0-9]+(,[0-9]+)*)$ ]] || die "--gpus $gpus: must be all, or numbers: 0,1" 2
    user_name=$(id -un 2>/dev/null || id -u) # the number if the name is unknown
    container=${container:-llm-train-bench-${user_name//[^A-Za-z0-9_.-]/_}-$vendor}
    output=$(absolute "${output:-$repo/runs}")
    cache=$(absolute "$cache")
    local name
    for name in $host_files; do
        [ -z "${!name:-}" ] || { [[ ${!name} = /* ]] && [ -f "${!name}" ]; } ||
            die "$name=${!name}: must be the whole path of a file here; unset it, or correct it" 2
    done
    for path in "$repo" "$output" "$cache" "${NCCL_TOPO_FILE:-}" "${LLM_TRAIN_BENCH_HARDWARE:-}"; do
        [[ $path != *[,\"]* ]] || die "$path: a path with a comma or quote cannot be mounted; choose another" 2
    done
}

find_engine() {
    if [ -z "$engine" ]; then
        for candidate in podman docker; do # docker where both are
            ! command -v "$candidate" >/dev/null || engine=$candidate
        done
    fi
    if ! command -v "${engine:-docker}" >/dev/null; then
        lack "no ${engine:-docker or podman} on PATH; install it, for example: sudo apt-get install podman"
    fi
    engine=${engine:-docker} podman="" # a dry run goes on
    if "$engine" --version 2>/dev/null | grep -qi podman; then
        podman=1
    elif ! command -v "$engine" >/dev/null; then
        : # said already
    elif ! problem=$("$engine" info 2>&1 >/dev/null); then
        case $problem in
        *"ermission denied"*) lack "docker refuses you its socket: sudo usermod -aG docker $user_name, then log in again" ;;
        *) lack "the docker daemon does not answer: sudo systemctl start docker" ;;
        esac
    fi
    rootless="" selinux=""
    if [ -n "$podman" ]; then
        build="${build/docker build/$engine build --format docker}"
        [ "$(id -u)" = 0 ] || rootless=1
    else
        local security
        security=$("$engine" info --format '{{.SecurityOptions}}' 2>/dev/null || true)
        [[ $security != *rootless* ]] || rootless=1
        [[ $security != *selinux* ]] || selinux=1
    fi
}

short_name() { # podman gives an image's full name
    local name=${1#localhost/}
    name=${name#docker.io/}
    name=${name#library/}
    echo "${name%:latest}"
}

find_image() {
    # The name that the first llm-train-bench built it under.
    local older=llm-train-bench
    [ "$vendor" != amd ] || older=llm-train-bench/amd
    if ! "$engine" image inspect "$image" >/dev/null 2>&1; then
        if [ -z "$asked$cpu" ] && "$engine" image inspect "$older" >/dev/null 2>&1; then
            image=$older
        else
            lack "no image $image; build it: $build"
            digest=unknown
            return
        fi
    fi
    # A container cannot know its image: the run records the digest passed in here.
    digest=$("$engine" image inspect --format \
        '{{if .RepoDigests}}{{index .RepoDigests 0}}{{else}}{{.Id}}{{end}}' "$image")
}

# The host's user inside, so that files belong to it.
user_arguments() {
    local user
    user="$(id -u):$(id -g)"
    if [ -n "$podman" ]; then
        [ -z "$rootless" ] || args+=(--userns=keep-id)
    elif [ -n "$rootless" ]; then
        user=0:0 # rootless docker: root inside is you
    fi
    # Otherwise the mounted directories cannot be read.
    [ -z "$podman$selinux" ] || args+=(--security-opt label=disable)
    args+=(--user "$user")
    # Without a name for the user id, PyTorch before 2.13 finds no place for its caches.
    args+=(-e "USER=$user_name" -e "LOGNAME=$user_name" -e HOME=/cache/home)
}

mount_arguments() {
    # By image: kernels compiled for one torch are no good to another.
    caches=$cache/${image//[^A-Za-z0-9._-]/_}
    if [ -z "$dry" ]; then # docker would make missing directories as root
        local directory
        for directory in "$caches/home" "$output" "$repo/runs"; do
            mkdir -p "$directory" 2>/dev/null ||
                die "$directory: cannot be made; --output and --cache choose others, runs/ must be there"
        done
    fi
    args+=(--mount "type=bind,src=$repo,dst=$workdir" --mount "type=bind,src=$output,dst=$workdir/runs")
    args+=(--mount "type=bind,src=$caches,dst=/cache" --workdir "$workdir")
    args+=(${mounts[@]+"${mounts[@]}"})
    local name
    for name in $host_files; do
        [ -z "${!name:-}" ] || args+=(--mount "type=bind,src=${!name},dst=${!name},readonly")
    done
    args+=(-e XDG_CACHE_HOME=/cache/xdg -e TORCHINDUCTOR_CACHE_DIR=/cache/inductor)
    args+=(-e TRITON_CACHE_DIR=/cache/triton -e HF_HOME=/cache/hf)
    args+=(-e AITER_JIT_DIR=/cache/aiter -e CK_JIT_CACHE_DIR=/cache/ck)
}

may_raise_limits() { # docker's daemon may; podman does it itself, and needs CAP_SYS_RESOURCE
    local capabilities
    capabilities=$(sed -n 's/^CapEff:[[:space:]]*//p' /proc/self/status 2>/dev/null)
    [ -z "$podman" ] || [ -z "$capabilities" ] || [ $((16#$capabilities >> 24 & 1)) = 1 ]
}

network_arguments() {
    args+=(--network host --ipc=host --ulimit stack=67108864)
    if [ "$(ulimit -H -l)" = unlimited ] || { [ -z "$rootless" ] && may_raise_limits; }; then
        args+=(--ulimit memlock=-1) # otherwise the container would not start
    fi
    if [ -n "$podman" ] && [ -z "$rootless" ] && ! may_raise_limits; then # podman raises these by itself
        args+=(--ulimit "nofile=$(ulimit -Sn):$(ulimit -Hn)" --ulimit nproc=32768:32768)
    fi
    if [ -d "$root/dev/infiniband" ] && [ -n "$(ls -A "$root/sys/class/infiniband" 2>/dev/null)" ]; then
        args+=(--device /dev/infiniband --cap-add IPC_LOCK)
    fi
}

# Variables of the host that concern a run: they override those of the image and of amd.env. Keys and
# tokens are among them. They are passed by name, so that no command line has their values.
passed_on='^(NCCL|RCCL|TORCH|PYTORCH|NVTE|HSA|HIP|ROCR|GPU_MAX|DISABLE_ADDMM|GLOO|OMP|UCX|FI|OFI_NCCL|WANDB|HF)_'
passed_on+='|^CUDA_(VISIBLE_DEVICES|DEVICE_MAX_CONNECTIONS)$|^(NNODES|NODE|WAIT|HEAD|PORT|GPUS|NUMA|JOB_ID|MAX_RESTARTS|MASTER_ADDR|MASTER_PORT)$'

# Paths on the host are not those in the image.
kept_back='_(PATH|HOME|DIR|CACHE|FILE|PLATFORM)$'
# But for these files, which are mounted at their own paths.
host_files='NCCL_TOPO_FILE LLM_TRAIN_BENCH_HARDWARE'

environment_arguments() {
    local name revision
    while IFS= read -r name; do
        # With --gpus the container has these GPUs only, and numbers them from 0.
        [ "$gpus" != all ] && [[ $name = *_VISIBLE_DEVICES ]] || args+=(-e "$name")
    done < <(compgen -e | grep -E "$passed_on" | grep -Ev "$kept_back" | sort)
    for name in $host_files; do
        [ -z "${!name:-}" ] || args+=(-e "$name")
    done
    # The revision of the mounted tree, not of the image.
    revision=$(git -c "safe.directory=$repo" -C "$repo" rev-parse HEAD 2>/dev/null || true)
    args+=(-e "BENCH_GIT_SHA=$revision")
    args+=(${named[@]+"${named[@]}"})
    [ ${#pairs[@]} = 0 ] || own_variables
}

own_variables() { # those with a value. An engine prefers -e to a file, so no -e may set them too
    local i kept=() names=" ${pairs[*]%%=*} "
    for ((i = 0; i < ${#args[@]}; i++)); do
        if [ "${args[i]}" = -e ] && [[ $names = *" ${args[i + 1]%%=*} "* ]]; then
            i=$((i + 1))
        else
            kept+=("${args[i]}")
        fi
    done
    args=(${kept[@]+"${kept[@]}"})
    if [ -n "$dry" ]; then
        for name in $names; do args+=(-e "$name"); done
    else
        exec 9< <(printf '%s\n' "${pairs[@]}") # a file that no other process sees
        args+=(--env-file /dev/fd/9)
    fi
}

has_init() { # podman's --init needs a program that Debian only recommends
    [ -n "$podman" ] || return 0
    command -v catatonit >/dev/null || compgen -G "$root/usr/*/podman/catatonit" >/dev/null ||
        compgen -G "$root/usr/local/*/podman/catatonit" >/dev/null ||
        grep -qsE '^ *init_path *=' "$root/etc/containers/containers.conf" "${HOME:-/}/.config/containers/containers.conf"
}

terminal=()
[ ! -t 0 ] || [ ! -t 1 ] || terminal=(-t)

run() { # print or do
    [ -n "$dry" ] || exec "$@"
    printf '%q ' "$@"
    echo
}

# Commands go through bash: NVIDIA's images set up their driver libraries in bash's start-up files.
# shellcheck disable=SC2016
through_bash=(bash -c 'exec "$@"' bash)

main() {
    parse "$@"
    find_engine
    [ -n "$cpu" ] || find_gpus
    [ ${#command[@]} != 0 ] || command=(bash)
    local state its_image its_tree
    # shellcheck disable=SC2034 # its_image is looked at where one was asked for
    IFS='|' read -r state its_image its_tree < <("$engine" container inspect --format \
        '{{.State.Running}}|{{.Config.Image}}|{{index .Config.Labels "llm-train-bench.tree"}}' "$container" 2>/dev/null || true) || true
    if [ -n "$state" ]; then
        [ -z "$fixed" ] ||
            die "$fixed: container $container is there, and cannot change it; --name starts another"
        [ -z "$asked" ] || [ "$(short_name "$asked")" = "$(short_name "$its_image")" ] ||
            die "--image $asked: container $container is there already, of $its_image; --name starts another"
        [ "$its_tree" = "$repo" ] ||
            die "container $container is of another tree, ${its_tree:-unknown}; --name starts another"
        echo "$script: container $container is there; entering it, with its GPUs and directories" >&2
        [ "$state" = true ] || [ -n "$dry" ] || "$engine" start "$container" >/dev/null
        args=()
        environment_arguments
        run "$engine" exec -i ${terminal[@]+"${terminal[@]}"} "${args[@]}" --workdir "$workdir" "$container" "${through_bash[@]}" "${command[@]}"
        return
    fi
    find_image
    args=(run --rm)
    if has_init; then
        args+=(--init)
    else
        echo "$script: podman has no catatonit, so the container starts without --init; install it: sudo apt-get install catatonit" >&2
    fi
    args+=(--pull=never --no-healthcheck -i ${terminal[@]+"${terminal[@]}"} --name "$container" --label "llm-train-bench.tree=$repo")
    [ -n "$cpu" ] || gpu_arguments
    network_arguments
    user_arguments
    mount_arguments
    environment_arguments
    args+=(-e "BENCH_IMAGE_NAME=$image" -e "BENCH_IMAGE_DIGEST=$digest")
    run "$engine" "${args[@]}" "$image" "${through_bash[@]}" "${command[@]}"
}
