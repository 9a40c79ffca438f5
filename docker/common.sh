# shellcheck shell=bash
# What launch.sh and launch_amd.sh share; they source it. They set script, vendor, image, older_image (its name in the
# first llm-train-bench) and build, and the functions find_gpus (says what is missing) and gpu_arguments (adds to args).
set -euo pipefail
: "${script:?}" "${vendor:?}" "${image:?}" "${older_image:?}" "${build:?}"

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
workdir=/workspace/llm-train-bench
root=${BENCH_TEST_ROOT:-} # tests put another /dev, /sys, /proc and /etc before the paths looked at

# What the options ask for.
gpus=all cpu="" dry="" engine="" asked="" container="" output=$repo/runs
cache=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/llm-train-bench
fixed=""          # the last option that a running container cannot follow
extra=()          # mounts and variables; they follow args, since of several variables the last counts
podman="" rootless="" # what the engine is

# Variables of the host that concern a run, keys and tokens among them, but no paths: the image has others.
passed_on='^(NCCL|RCCL|TORCH|PYTORCH|NVTE|HSA|HIP|ROCR|GPU_MAX|DISABLE_ADDMM|GLOO|OMP|UCX|FI|OFI_NCCL|WANDB|HF)_'
passed_on+='|^CUDA_(VISIBLE_DEVICES|DEVICE_MAX_CONNECTIONS)$'
passed_on+='|^(NNODES|NODE|WAIT|HEAD|PORT|GPUS|JOB_ID|MASTER_ADDR|MASTER_PORT)$'
kept_back='_(PATH|HOME|DIR|CACHE|FILE|PLATFORM)$'

usage() {
    cat <<END
Usage: docker/$script [OPTIONS] [COMMAND ...]

Runs COMMAND (by default a shell) in a container with this repository and all GPUs, as your own user. If the container
runs already, COMMAND runs in it, with its GPUs and directories, and ends when its first command ends.

  --gpus LIST      which GPUs: all (default), or numbers: 0,1
  --cpu            no GPUs, and the image llm-train-bench:cpu
  --image NAME     image (default $image; environment: BENCH_IMAGE)
  --name NAME      name of the container (default llm-train-bench-USER-$vendor)
  --output DIR     directory for results, instead of runs/ in the repository
  --mount HOST[:CONTAINER][:ro]  a file or directory of this machine, by default at its own path; repeatable
  --env NAME       an exported variable of this shell, for the container; repeatable
  --env-file FILE  a file of NAME=VALUE lines, as docker reads it; repeatable
  --cache DIR      compiled kernels and downloads, kept between runs (default ~/.cache/llm-train-bench)
  --engine NAME    docker or podman (default: the first there is)
  --dry-run        print the command line and stop

Build the image first: $build
END
}

die() { # one line: the problem, then what helps
    echo "$script: $1" >&2
    exit "${2:-1}"
}

lack() { # what this machine has not: an error, but for a dry run, which only says it
    [ -n "$dry" ] || die "$1"
    echo "$script: not here: $1" >&2
}

add_mount() { # SOURCE TARGET [,readonly]. A comma, quote or line break would say more than that to the engine
    local source=$1
    [[ $source = /* ]] || source=$PWD/$source
    [[ $source$2 != *[,\"$'\n']* ]] || die "$source${2:+:$2}: a path with comma, quote or line break cannot be mounted" 2
    extra+=(--mount "type=bind,src=$source,dst=${2:-$source}${3:-}")
}

parse() {
    local option value
    while [[ ${1:-} = -* ]]; do
        option=$1 value=${2:-}
        shift
        case $option in
        -h | --help) usage && exit ;;
        --dry-run) dry=1 && continue ;;
        --cpu) cpu=1 && continue ;;
        --) break ;;
        --gpus) gpus=$value fixed=$option ;;
        --image) asked=$value fixed=$option ;;
        --output) output=$value fixed=$option ;;
        --cache) cache=$value fixed=$option ;;
        --name) container=$value ;;
        --engine) engine=$value ;;
        --mount)
            [[ $value =~ ^([^:]+)(:(/[^:]*))?(:ro)?$ ]] ||
                die "--mount $value: must be HOST[:CONTAINER][:ro], and CONTAINER a whole path" 2
            add_mount "${BASH_REMATCH[1]}" "${BASH_REMATCH[3]}" "${BASH_REMATCH[4]:+,readonly}"
            fixed=$option
            ;;
        --env)
            [[ $value =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || die "--env ${value%%=*}: must be a NAME, whose variable is exported here" 2
            printenv "$value" >/dev/null || die "--env $value: is not exported here" 2
            extra+=(-e "$value")
            ;;
        --env-file)
            [ -f "$value" ] && [ -r "$value" ] || die "--env-file $value: cannot be read" 2
            extra+=(--env-file "$value")
            ;;
        *) die "$option: no such option; see $script --help" 2 ;;
        esac
        [[ $value = [!-]* ]] || die "$option needs a value; see $script --help" 2
        shift
    done
    command=("${@:-bash}")
    if [ -n "$cpu" ]; then
        vendor=cpu image=llm-train-bench:cpu build="docker build -t llm-train-bench:cpu -f docker/Dockerfile.cpu ."
    fi
    asked=${asked:-${BENCH_IMAGE:-}}
    image=${asked:-$image}
    user_name=$(id -un 2>/dev/null || id -u)
    container=${container:-llm-train-bench-${user_name//[^A-Za-z0-9_.-]/_}-$vendor}
    [[ $gpus =~ ^(all|[0-9]+(,[0-9]+)*)$ ]] || die "--gpus $gpus: must be all, or numbers: 0,1" 2
    [[ $engine =~ ^(docker|podman|)$ ]] || die "--engine $engine: must be docker or podman" 2
}

find_engine() {
    if [ -z "$engine" ]; then
        engine=docker
        command -v docker >/dev/null || ! command -v podman >/dev/null || engine=podman
    fi
    command -v "$engine" >/dev/null || lack "no $engine on PATH; install docker, or: sudo apt-get install podman"
    if [[ $("$engine" --version 2>/dev/null) = *podman* ]]; then # some call it docker
        podman=1
        build=${build/docker/$engine}
        [ "$(id -u)" = 0 ] || rootless=1
    elif [[ $("$engine" info --format '{{.SecurityOptions}}' 2>/dev/null) = *rootless* ]]; then
        rootless=1
    fi
}

find_image() { # and its digest for the run's result, since a container cannot know it
    local format='{{if .RepoDigests}}{{index .RepoDigests 0}}{{else}}{{.Id}}{{end}}' name
    for name in "$image" "$older_image"; do
        if digest=$("$engine" image inspect --format "$format" "$name" 2>&1); then
            image=$name
            return
        fi
        [ -z "$asked$cpu" ] || break # only the default image has an older name
    done
    lack "no image $image (${digest##*$'\n'}); build it: $build"
    digest=unknown
}

network_arguments() {
    args+=(--network host --ipc=host --ulimit stack=67108864)
    ulimit -l unlimited 2>/dev/null || true
    if [ "$(ulimit -l)" = unlimited ] || [ -z "$podman$rootless" ]; then # else the container would not start
        args+=(--ulimit memlock=-1)
    fi
    [ ! -d "$root/dev/infiniband" ] || args+=(--device /dev/infiniband --cap-add IPC_LOCK)
}

user_arguments() { # the user of the host, to whom belongs what a run writes
    local user
    user=$(id -u):$(id -g)
    if [ -n "$rootless" ] && [ -n "$podman" ]; then
        args+=(--userns=keep-id)
    elif [ -n "$rootless" ]; then
        user=0:0 # root inside is the user of the daemon
    fi
    args+=(--user "$user" --security-opt label=disable) # SELinux would not let it read what is mounted
    # Without a name for the user id, PyTorch before 2.13 finds no place for its caches.
    args+=(-e "USER=$user_name" -e "LOGNAME=$user_name" -e HOME=/cache/home)
}

mount_arguments() {
    local kept=$cache/${image//[^A-Za-z0-9._-]/_} # kernels compiled for one torch are no good to another
    local name
    add_mount "$repo" "$workdir"
    add_mount "$output" "$workdir/runs"
    add_mount "$kept" /cache
    for name in NCCL_TOPO_FILE LLM_TRAIN_BENCH_HARDWARE; do # each names a file, which keeps its path
        [ -z "${!name:-}" ] || args+=(-e "$name")
        [[ ${!name:-} != /* ]] || add_mount "${!name}" "" ,readonly
    done
    [ -n "$dry" ] || mkdir -p "$kept/home" "$output" "$repo/runs" # docker would make them as root
    args+=(-e XDG_CACHE_HOME=/cache/xdg -e TORCHINDUCTOR_CACHE_DIR=/cache/inductor)
    args+=(-e TRITON_CACHE_DIR=/cache/triton -e HF_HOME=/cache/hf -e AITER_JIT_DIR=/cache/aiter -e CK_JIT_CACHE_DIR=/cache/ck)
}

pass_host_variables() { # by name, so that no command line has their values
    local name
    # With --gpus the container has these GPUs only, and numbers them from 0.
    [ "$gpus" = all ] || kept_back+='|_VISIBLE_DEVICES$'
    for name in $(compgen -e | grep -E "$passed_on" | grep -Ev "$kept_back"); do
        args+=(-e "$name")
    done
}

run() { # in a container that args start or enter: print or do
    # Through bash: NVIDIA's images set up their driver libraries in its start-up files.
    # shellcheck disable=SC2016
    local line=("$engine" "${args[@]}" "${extra[@]}" "$1" bash -c 'exec "$@"' bash "${command[@]}")
    [ -n "$dry" ] || exec "${line[@]}"
    printf '%q ' "${line[@]}"
    echo
}

enter() { # IMAGE TREE of the container that runs
    [ -z "$fixed" ] || die "$fixed: container $container runs already, and cannot follow; --name starts another"
    [ "$2" = "$repo" ] || die "container $container is of another tree, $2; --name starts another"
    echo "$script: entering container $container of image $1, with its GPUs and directories" >&2
    args=(exec "${common[@]}")
    pass_host_variables
    run "$container"
}

start() {
    find_image
    args=(run "${common[@]}" --rm --init --pull=never --name "$container" --label "llm-train-bench.tree=$repo")
    if [ -z "$cpu" ]; then
        find_gpus
        gpu_arguments
    fi
    network_arguments
    user_arguments
    mount_arguments
    pass_host_variables
    args+=(-e "BENCH_IMAGE_NAME=$image" -e "BENCH_IMAGE_DIGEST=$digest")
    run "$image"
}

main() {
    parse "$@"
    find_engine
    # The revision of the mounted tree, not of the image.
    common=(-i --workdir "$workdir"
        -e "BENCH_GIT_SHA=$(git -c "safe.directory=$repo" -C "$repo" rev-parse HEAD 2>/dev/null || true)")
    [ ! -t 0 ] || [ ! -t 1 ] || common+=(-t)
    local format='{{.Config.Image}}|{{index .Config.Labels "llm-train-bench.tree"}}' its_image="" its_tree
    IFS='|' read -r its_image its_tree < <("$engine" container inspect --format "$format" "$container" 2>/dev/null) || true
    if [ -n "$its_image" ]; then # where there is none docker prints an empty line
        enter "$its_image" "$its_tree"
    else
        start
    fi
}
