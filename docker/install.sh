#!/usr/bin/env bash
# The dependency layer of every Dockerfile: installs what pyproject.toml asks for beside the image's own
# torch, TE and CUDA or ROCm libraries, and fails if any of these was replaced.
#   install.sh PYPROJECT DIRECTORY [EXTRA ...]
# DIRECTORY keeps what the image had (base.txt), what had to stay (kept.txt), torch.version for HEALTHCHECK.
# PYTHON chooses the interpreter; REQUIRE adds a requirement (tests use it).
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
pyproject=$1 directory=$2
shift 2
python=${PYTHON:-python3}
mkdir -p "$directory"

freeze() { # every package with its version, as written in the image itself: pip shows nv26.09 as nv26.9
    "$python" - <<'PY'
import importlib.metadata as m
print("\n".join(sorted({f"{d.metadata['Name']}=={d.version}" for d in m.distributions()})))
PY
}

freeze >"$directory/base.txt"
# The image's makers built these against each other; we need only the Python part of torchao.
grep -iE '^(torch|triton|pytorch[-_]triton|transformer[-_]engine|flash[-_]attn|nvidia[-_]|numpy|apex|aiter|amd)' \
    "$directory/base.txt" | grep -viE '^torchao==' >"$directory/kept.txt" || true

"$python" - "$pyproject" "$@" >"$directory/requirements.txt" <<'PY'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
wanted = project["dependencies"] + [r for e in sys.argv[2:] for r in project["optional-dependencies"][e]]
print("\n".join(r for r in wanted if not r.startswith("torch>")))
PY
if [ -n "${REQUIRE:-}" ]; then
    echo "$REQUIRE" >>"$directory/requirements.txt"
fi
"$python" -m pip install --no-cache-dir --disable-pip-version-check -q \
    -c "$directory/kept.txt" -r "$directory/requirements.txt"

freeze >"$directory/after.txt"
changed=$(LC_ALL=C comm -23 "$directory/kept.txt" "$directory/after.txt")
if [ -n "$changed" ]; then
    echo "install.sh: pip replaced what belongs to the image: $(echo "$changed" | tr '\n' ' ')" >&2
    exit 1
fi
# The image's torch stays what it is, but may be too old for us.
"$python" - "$pyproject" "$directory/torch.version" <<'PY'
import importlib.metadata, re, sys, tomllib
have = importlib.metadata.version("torch")
wanted = tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"]
(least,) = [r.removeprefix("torch>=") for r in wanted if r.startswith("torch>=")]
if [int(n) for n in re.findall(r"\d+", have)[:2]] < [int(n) for n in least.split(".")]:
    sys.exit(f"install.sh: the image has torch {have}, and {least} is needed: choose a newer BASE_IMAGE")
open(sys.argv[2], "w").write(have + "\n")
PY
