#!/usr/bin/env bash
# Build the images for real and run the CPU one, by buildah, where no daemon can start: as root,
#   tests/image_test.sh            (make image-test)
# BASE_IMAGE=NAME chooses the CPU image's base. Where that of the Dockerfile cannot be pulled, one is made by
# debootstrap and this machine's own Python and pip settings.
# MOUNTS="DIR ..." are directories that pip needs (its file:// indexes), the same inside.
# The dependency layers of the NVIDIA and AMD Dockerfiles are built on that base with stand-ins of
# their torch, Transformer Engine and Triton; a build fails if it changed one of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export BUILDAH_ISOLATION=chroot
command -v buildah >/dev/null || { echo "image_test.sh: apt-get install buildah debootstrap" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "image_test.sh: buildah with --isolation chroot needs root" >&2; exit 2; }
volumes=()
for directory in ${MOUNTS:-}; do
    volumes+=(-v "$directory:$directory:ro")
done
made=llm-train-bench-base:made

make_base() {
    local container tree prefix
    container=$(buildah from scratch)
    tree=$(buildah mount "$container")
    debootstrap --variant=minbase --include=ca-certificates,libssl3,libffi8,libsqlite3-0,libbz2-1.0,liblzma5,zlib1g,libreadline8,libexpat1,libncursesw6,libuuid1 \
        "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$tree" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >/dev/null
    prefix=$(python3 -c 'import sys; print(sys.base_prefix)')
    tar -C "$prefix" --exclude='site-packages/*' --exclude='lib/python3*/test' --exclude='*.pyc' -cf - bin lib include | tar -C "$tree/usr/local" -xf -
    rm -f "$tree"/usr/local/bin/pip*
    cp -a /etc/ssl/certs/. "$tree/etc/ssl/certs/"
    buildah umount "$container" >/dev/null
    buildah run "$container" -- ldconfig
    buildah run "$container" -- /usr/local/bin/python3 -m ensurepip >/dev/null
    local name
    while IFS= read -r name; do
        buildah config --env "$name=${!name}" "$container"
    done < <(compgen -e | grep '^PIP_' || true)
    # A venv's python finds its packages by where it is; so does this copy.
    buildah config --env PYTHONHOME=/usr/local "$container"
    buildah commit -q --rm "$container" "$made" >/dev/null
}

base=${BASE_IMAGE:-$(sed -n 's/^ARG BASE_IMAGE=//p' docker/Dockerfile.cpu)}
if ! buildah pull -q "$base" >/dev/null 2>&1; then
    echo "image_test.sh: $base cannot be pulled; a base is made of this machine's Debian and Python"
    buildah inspect --type image "$made" >/dev/null 2>&1 || make_base
    base=$made
fi
build() { # name, Dockerfile, more
    local name=$1 file=$2
    shift 2
    buildah bud -q --layers "${volumes[@]}" -t "$name" -f "$file" --build-arg "GIT_SHA=$(git rev-parse HEAD)" "$@" .
}
index=()
if [ "$base" = "$made" ]; then
    index=(--build-arg "TORCH_INDEX=${TORCH_INDEX:-https://pypi.org/simple}")
fi
build llm-train-bench:cpu docker/Dockerfile.cpu --build-arg "BASE_IMAGE=$base" "${index[@]}" >/dev/null
echo "built llm-train-bench:cpu on $base"

inside() {
    buildah run "${volumes[@]}" --user 1000:1000 "$container" -- "$@"
}
container=$(buildah from llm-train-bench:cpu)
trap 'buildah rm "$container" >/dev/null' EXIT
inside bash -c 'python3 prepare_data.py --stdlib --output-dir /home/bench/data &&
  python3 train.py configs/llama-tiny.json --data /home/bench/data/train.bin --val-data /home/bench/data/val.bin --amp off \
    --n-steps 30 --bsz 8 --seq-len 256 --lr 2e-3 --run-name demo'
inside python3 train_ddp.py configs/gpt2-tiny.json --bsz 2 --seq-len 64 --n-steps 5 --warmup-steps 2 --run-name ddp
inside python3 train.py configs/gpt2-tiny.json --bsz 2 --seq-len 64 --n-steps 5 --warmup-steps 3 --pt-compile --run-name compiled
inside bash -c 'python3 compare.py runs && python3 -c "
import json
e = json.load(open(\"runs/demo/result.json\"))
assert e[\"status\"] == \"ok\" and e[\"environment\"][\"git_sha\"], e[\"environment\"]"'
buildah inspect --type image llm-train-bench:cpu | python3 -c '
import json, sys
config = json.load(sys.stdin)["OCIv1"]["config"]
assert config["User"] == "1000:1000", config'
buildah run "${volumes[@]}" --user 0:0 "$container" -- python3 -m pip install -q pytest pytest-xdist hypothesis >/dev/null
inside python3 -m pytest -q -p no:cacheprovider -n 2 tests/test_data.py tests/test_loss.py tests/test_statistics.py tests/test_hardware.py tests/test_precision.py

# The launcher under a real engine, where there is one: its user, mounts and variables, and the digest. By itself podman
# raises limits that root without all its rights cannot raise.
# shellcheck disable=SC2016 # the container's own
if command -v podman >/dev/null; then
    out=$(mktemp -d)
    mkdir "$out/data" "$out/bin"
    echo "data of the host" >"$out/data/text"
    printf '#!/bin/sh\n[ "$1" = run ] && shift && set -- run --ulimit nofile=%s:%s --ulimit nproc=32768 "$@"\nexec %s "$@"\n' \
        "$(ulimit -Sn)" "$(ulimit -Hn)" "$(command -v podman)" >"$out/bin/podman"
    chmod +x "$out/bin/podman"
    PATH=$out/bin:$PATH A_KEY=sesame docker/launch.sh --cpu --engine podman --name llm-train-bench-image-test \
        --output "$out" --cache "$out/cache" --mount "$out/data:/data:ro" --env A_KEY --env LEVEL=2 --env HF_HOME=/data \
        bash -c '[ "$A_KEY$LEVEL$HF_HOME" = sesame2/data ] && cat /data/text && ! touch /data/new 2>/dev/null &&
            python train_fsdp.py configs/llama-tiny.json --sac-freq 1/4 --bsz 1 --seq-len 64 \
            --n-steps 5 --warmup-steps 2 --run-name launched'
    python3 - "$out/launched" <<'PY'
import json, pathlib, sys
text = (pathlib.Path(sys.argv[1]) / "result.json").read_text()
result = json.loads(text)
assert result["status"] == "ok" and result["device"]["count"] == 2 and "sesame" not in text
assert result["environment"]["image"]["name"] == "llm-train-bench:cpu", result["environment"]["image"]
print("launched under podman, image", result["environment"]["image"]["digest"])
PY
    rm -rf "$out"
else
    echo "no podman: docker/launch.sh was not run under a real engine"
fi

# The other two, down to the layer with the dependencies.
for vendor in nvidia amd; do
    file=docker/Dockerfile
    [ $vendor = nvidia ] || file=docker/Dockerfile.amd
    stand_in=$(buildah from "$base")
    # shellcheck disable=SC2016
    buildah run "${volumes[@]}" "$stand_in" -- python3 -c '
import pathlib, sysconfig
site = pathlib.Path(sysconfig.get_paths()["purelib"])
for name, version in (("torch", "2.14.0a0+stand.in"), ("triton", "3.6.0"), ("transformer_engine", "2.20.0"), ("numpy", "1.26.4")):
    (site / name).mkdir(exist_ok=True)
    (site / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")'
    buildah commit -q --rm "$stand_in" "stand-in:$vendor" >/dev/null
    build "llm-train-bench:$vendor-layer" $file --build-arg "BASE_IMAGE=stand-in:$vendor" >/dev/null
    echo "built the dependency layer of $file on stand-ins"
done
echo "image-test: ok"
