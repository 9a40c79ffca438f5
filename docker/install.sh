#!/usr/bin/env bash
# The dependency layer of every Dockerfile: installs what pyproject.toml asks for beside the image's own
# torch, TE and CUDA or ROCm libraries, and fails if any of these was replaced.
#   install.sh PYPROJECT DIRECTORY [EXTRA ...]
# What the image's makers built, and what they pinned for pip (PIP_CONSTRAINT), stays as it is. An extra's
# requirement that contradicts it is left out, with one line; one of the project's own ends the build.
# DIRECTORY keeps what the image had (base.txt), what had to stay (kept.txt), torch.version for HEALTHCHECK.
# PYTHON chooses the interpreter; REQUIRE adds a requirement (tests use it).
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
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
# kept.txt: installed, and built or pinned by the image's makers. constraints.txt: also what they
# pinned but did not install. requirements.txt: what we ask for, less what contradicts these.
"$python" - "$pyproject" "$directory" "$@" <<'PY'
import os, pathlib, re, sys, tomllib
from pip._vendor.packaging.requirements import InvalidRequirement, Requirement
from pip._vendor.packaging.utils import canonicalize_name

project = tomllib.load(open(sys.argv[1], "rb"))["project"]
directory = pathlib.Path(sys.argv[2])
pins, where = {}, os.environ.get("PIP_CONSTRAINT", "").split()
for line in (line for path in where for line in pathlib.Path(path).read_text().splitlines()):
    try:
        pin = Requirement(re.sub(r"(^|\s)#.*", "", line).strip())
    except InvalidRequirement:  # empty, or one of pip's options
        continue
    if pin.specifier and (pin.marker is None or pin.marker.evaluate()):
        pins[canonicalize_name(pin.name)] = pin
# The makers built these against each other.
built = re.compile(r"(torch|triton|pytorch-triton|transformer-engine|flash-attn|nvidia-|numpy|apex|aiter|amd|rocm)")
kept, have = [], {}
for line in (directory / "base.txt").read_text().splitlines():
    name = canonicalize_name(line.partition("==")[0])
    if name in pins or built.match(name):
        kept.append(line)
        have[name] = line.partition("==")[2]
missing = [str(pin) for name, pin in pins.items() if name not in have]


def contradicts(text):
    """What the image has or pins instead, or None."""
    wanted = Requirement(text)
    name = canonicalize_name(wanted.name)
    if name in have:
        fits = wanted.specifier.contains(have[name], prereleases=True)
        return None if fits else f"the image has {name} {have[name]}"
    exact = [s.version for s in pins[name].specifier if s.operator == "=="] if name in pins else []
    fits = all(wanted.specifier.contains(version, prereleases=True) for version in exact)
    return None if fits else f"the image pins {pins[name]}"


own = [r for r in project["dependencies"] if not r.startswith("torch>")]  # torch is looked at below
for text in own:
    if problem := contradicts(text):
        sys.exit(f"install.sh: {problem}, and {text} is needed: choose a newer BASE_IMAGE")
extras = []
for text in (r for extra in sys.argv[3:] for r in project["optional-dependencies"][extra]):
    if problem := contradicts(text):
        print(f"install.sh: left out {text}: {problem}", file=sys.stderr)
    else:
        extras.append(text)
required = [os.environ["REQUIRE"]] if os.environ.get("REQUIRE") else []
for file, lines in (("kept", kept), ("constraints", kept + missing), ("requirements", own + extras + required)):
    (directory / f"{file}.txt").write_text("".join(f"{line}\n" for line in lines))
PY
# In place of the image's constraints: what is installed wins over them, and pip would go back to theirs.
PIP_CONSTRAINT=$directory/constraints.txt "$python" -m pip install --no-cache-dir \
    --disable-pip-version-check -q -r "$directory/requirements.txt"

freeze >"$directory/after.txt"
changed=$(LC_ALL=C comm -23 <(LC_ALL=C sort "$directory/kept.txt") <(LC_ALL=C sort "$directory/after.txt"))
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
