#!/usr/bin/env bash
# The dependency layer of every Dockerfile: installs what pyproject.toml asks for, and changes no package of the image.
#   install.sh PYPROJECT [EXTRA ...]
# What the image has, and what its makers pinned for pip (PIP_CONSTRAINT), stays as it is. An extra's requirement
# that contradicts it is left out, with one line; one of the project's own ends the build. PYTHON is the interpreter.
set -euo pipefail
pyproject=$1
shift
python=${PYTHON:-python3}
lists=$(mktemp -d)

die() {
    echo "install.sh: $1" >&2
    exit 1
}

freeze() {
    "$python" -m pip list --disable-pip-version-check --format freeze | LC_ALL=C sort
}

requirements() { # of the project itself, or of the extras named
    "$python" - "$pyproject" "$@" <<'PY'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
lists = [project["optional-dependencies"][extra] for extra in sys.argv[2:]] or [project["dependencies"]]
print(*[requirement for one in lists for requirement in one], sep="\n")
PY
}

install() {
    PIP_CONSTRAINT=$lists/constraints "$python" -m pip install --no-cache-dir --disable-pip-version-check "$@"
}

freeze >"$lists/before"
# Some distributions' versions are none of pip's. A pin counts for what the image has not: what it has wins.
grep -E '==([0-9]+!)?[0-9]+(\.[0-9]+)*((a|b|rc|\.post|\.dev)[0-9]+)*(\+[a-z0-9.]+)?$' "$lists/before" >"$lists/constraints"
sed 's/==.*//; s/[-_.]/[-_.]/g; s/.*/^&([^-a-z0-9_.]|$)/' "$lists/before" >"$lists/names"
# shellcheck disable=SC2086 # there may be several files, or none
cat ${PIP_CONSTRAINT:-/dev/null} | grep -viE -f "$lists/names" >>"$lists/constraints" || true

requirements >"$lists/own"
install -r "$lists/own" || die "the image contradicts what the project needs: choose a newer BASE_IMAGE"
requirements "$@" >"$lists/extras"
while IFS= read -r requirement; do
    if ! problem=$(install "$requirement" 2>&1); then
        reason=$(grep -m 1 '(constraint)' <<<"$problem") || die "$problem"
        echo "install.sh: left out $requirement:${reason#*requested (constraint)}" >&2
    fi
done <"$lists/extras"

changed=$(freeze | LC_ALL=C comm -23 "$lists/before" -)
[ -z "$changed" ] || die "pip replaced what belongs to the image: ${changed//$'\n'/ }"
