"""Containers without an engine: linters, launch scripts against a recording docker, manifests, layers."""

import gzip
import importlib.metadata
import itertools
import json
import os
import re
import resource
import socket
import stat
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from unittest import mock

import jsonschema
import pytest
import torch
import yaml

from llm_train_bench.run import provenance
from llm_train_bench.run.failures import PREEMPTED
from tests.helpers import ROOT, words

BIN = Path(sys.executable).parent
WORK = "/workspace/llm-train-bench"
DOCKERFILES = sorted(ROOT.glob("docker/Dockerfile*"))
NVIDIA, AMD = "launch.sh", "launch_amd.sh"
SCRIPTS = [*sorted(ROOT.glob("docker/*.sh")), ROOT / "docker/slurm.sbatch"]
ENGINE = """#!/bin/sh
here='{state}'
printf '%s\\0' "${{0##*/}}" "$@" >> "$here/calls"; echo >> "$here/calls"
shown() {{ cat "$here/$1" 2> /dev/null || echo "$2"; }}
case "$*" in *"/dev/fd/9 "*) cat <&9 > "$here/given" ;; esac
case "$*" in
--version*) echo '{version}' ;;
info*)
    if [ -e "$here/info_error" ]; then cat "$here/info_error" >&2; exit 1; fi
    case "$*" in *Runtimes*) shown runtimes '{{"nvidia": {{}}}}' ;; esac
    case "$*" in *SecurityOptions*) shown security '[name=seccomp]' ;; esac ;;
"image inspect "*)
    for last; do :; done
    if [ -e "$here/no_image" ]; then exit 1; fi
    if [ -e "$here/images" ] && ! grep -qxF "$last" "$here/images"; then exit 1; fi
    case "$*" in *RepoDigests*) echo example.com/bench@sha256:abc ;; *) echo '[]' ;; esac ;;
"container inspect "*) cat "$here/container" 2> /dev/null || exit 1 ;;
esac
"""
SRUN = """#!/bin/sh
printf '%s\\0' srun "$@" >> '{state}/calls'; echo >> '{state}/calls'
[ -e '{state}/environment' ] || env > '{state}/environment'
exit {code}
"""
# Tools that a stranger's machine may have. The simulated one has them only where a test puts them.
NOT_PLAIN = "catatonit docker podman nvidia rocm amd-smi srun scontrol kubectl nerdctl".split()


@pytest.fixture(scope="module")
def plain_tools(tmp_path_factory) -> Path:
    """A directory with this machine's tools, without engines, drivers' tools and launchers."""
    directory = tmp_path_factory.mktemp("tools")
    for place in (Path("/usr/bin"), Path("/bin")):
        for tool in place.iterdir():
            link = directory / tool.name
            if not tool.name.startswith(tuple(NOT_PLAIN)) and not link.is_symlink():
                link.symlink_to(tool)
    return directory


class Machine:
    """A simulated machine: an engine that records, GPUs, a root for /dev, /sys and /proc."""

    def __init__(self, tmp_path: Path, tools: Path):
        self.path = tmp_path / "bin"
        self.state, self.root, self.home = (tmp_path / n for n in ("state", "root", "home"))
        for directory in (self.path, self.state, self.root, self.home):
            directory.mkdir()
        self.environment = {
            "PATH": f"{self.path}:{tools}", "HOME": str(self.home), "USER": "someone",
            "BENCH_TEST_ROOT": str(self.root),
        }  # fmt: skip

    def put(self, name: str, text: str) -> None:
        file = self.path / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def engine(self, name: str = "docker", version: str = "Docker version 28.2.2") -> None:
        self.put(name, ENGINE.format(state=self.state, version=version))

    def podman(self) -> None:
        (self.path / "docker").unlink(missing_ok=True)
        self.engine("podman", "podman version 5.4.0")

    def slurm(self, kind: str, code: int = 0, preempted: str = "None") -> None:
        """A job of two nodes; srun and scontrol record."""
        answer = f'#!/bin/sh\necho "$@" >> "{self.state}/scontrol"\n'
        answer += f'[ "$1 $2" = "show job" ] && echo "   PreemptTime={preempted}" && exit\n'
        self.put("scontrol", f"{answer}echo node7\necho node8\n")
        self.put("srun", SRUN.format(state=self.state, code=code))
        job = dict(SUBMIT_DIR=str(ROOT), JOB_NODELIST="node[7-8]", JOB_ID="1234", JOB_NUM_NODES="2")
        self.environment |= {f"SLURM_{k}": v for k, v in job.items()} | {"CONTAINER": kind}

    def nvidia(self, n: int) -> None:
        lines = "".join(f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})\\n  MIG 1g\\n" for i in range(n))
        self.put("nvidia-smi", f'#!/bin/sh\nprintf "{lines}"\n')

    def file(self, path: str, text: str = "") -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def amd(self, n: int) -> None:
        self.file("/dev/kfd")
        for i in range(n):
            self.file(f"/dev/dri/renderD{128 + i}")

    def launch(self, *argv, script: str = NVIDIA, before: str = "true", **environment: str):
        """Exit code, stdout and stderr of a launch script, in a shell that runs `before` first."""
        command = ["bash", "-c", f'{before}; exec bash "$0" "$@"', str(ROOT / "docker" / script)]
        done = subprocess.run(
            command + words(*argv), env=self.environment | environment, capture_output=True,
            text=True, stdin=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    def refuses(self, status: int, message: str, *argv, **options) -> None:
        """A launch starts nothing, and says why in one line."""
        before = self.calls("run", "exec")
        code, out, error = self.launch(*argv, **options)
        assert (code, out) == (status, "") and message in error, error
        assert error.count("\n") == 1 and self.calls("run", "exec") == before, error

    def calls(self, *verbs: str) -> list[list[str]]:
        path = self.state / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        calls = [line.split("\0")[:-1] for line in lines]
        return [call for call in calls if not verbs or call[1] in verbs]

    def starts(self, *argv, **options) -> list[str]:
        """The command line of the container that a launch starts or enters; it must not fail."""
        (self.state / "calls").unlink(missing_ok=True)
        code, _, self.error = self.launch(*argv, **options)
        assert code == 0, self.error
        (call,) = self.calls("run", "exec")
        return call


@pytest.fixture
def machine(tmp_path, plain_tools):
    return Machine(tmp_path, plain_tools)


@pytest.fixture
def ready(machine):
    """Docker, its toolkit and two NVIDIA GPUs."""
    machine.engine()
    machine.nvidia(2)
    return machine


def values(call: list[str], flag: str) -> list[str]:
    return [b for a, b in itertools.pairwise(call) if a == flag]


@pytest.mark.parametrize("linter", [["hadolint", *DOCKERFILES], ["shellcheck", "-x", *SCRIPTS]])
def test_linters_find_nothing(linter):
    command = [BIN / linter[0], *linter[1:]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_images_are_pinned_labelled_and_not_root(path):
    text = path.read_text()
    assert re.search(r"^ARG BASE_IMAGE=\S+:\S+$", text, re.M) and ":latest" not in text
    assert re.findall(r"^USER (\S+)$", text, re.M)[-1] == "1000:1000"
    assert "HEALTHCHECK" in text and "org.opencontainers.image.revision" in text
    # The code and the revision come after the dependencies, so that these stay cached.
    places = [text.index(x) for x in ("install.sh /opt/bench/pyproject", "COPY . ", "ARG GIT_SHA=")]
    assert places == sorted(places)


def test_dockerignore_keeps_out_what_is_large_or_private_and_scripts_are_executable():
    assert {".git", ".venv*", "runs", "data"} <= set((ROOT / ".dockerignore").read_text().split())
    unfit = {script.name for script in SCRIPTS if not os.access(script, os.X_OK)}
    assert unfit <= {"common.sh", "slurm.sbatch"}


# --- the dependency layer --------------------------------------------------------------------------


VENDORS = {"torch": "2.14.0a0+b2c75dd062.nv26.09", "transformer_engine": "2.19.0+abc",
           "numpy": importlib.metadata.version("numpy")}  # fmt: skip
OUR_SITE = Path(str(distribution("pip").locate_file("")))  # importing pip would take distutils away
DESCRIBED = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
INSTALL = r"install\.sh /opt/bench/pyproject\.toml /opt/bench (.*)"


def put(site, name, version):
    """Install a package without code, as an image's makers did."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(DESCRIBED.format(name, version))
    (info / "INSTALLER").write_text("vendor\n")
    files = ("METADATA", "INSTALLER", "RECORD")
    (info / "RECORD").write_text("".join(f"{info.name}/{f},,\n" for f in files))


@pytest.fixture
def image(tmp_path):
    """A virtual environment that stands for a vendor's image, with the vendor's torch and numpy.

    Its pip finds the packages of this environment, as wheels without code.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    site = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    (site / "pip").symlink_to(OUR_SITE / "pip")
    for name, version in VENDORS.items():
        put(site, name, version)
    packages = [(p.metadata["Name"], p.version, p.read_text("METADATA")) for p in
                importlib.metadata.distributions()]  # fmt: skip
    packages.append(("wandb", "0.31.0", DESCRIBED.format("wandb", "0.31.0")))
    for name, version, described in packages:
        stem = re.sub(r"[-.]+", "_", name) + f"-{version}"
        files = {"METADATA": described, "WHEEL": WHEEL, "RECORD": ""}
        with zipfile.ZipFile(tmp_path / f"{stem}-py3-none-any.whl", "w") as wheel:
            for file, text in files.items():
                wheel.writestr(f"{stem}.dist-info/{file}", text or "")
    return site


def install(image, *extras, fails=False, **environment) -> str:
    """What install.sh writes to stderr."""
    top = image.parents[3]
    pip = {"PIP_NO_COMPILE": "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(top)}
    variables = os.environ | pip | {"PYTHON": str(top / "venv/bin/python")} | environment
    command = words("bash docker/install.sh pyproject.toml", top / "bench", *extras)
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert (done.returncode != 0) is fails, done.stderr
    return done.stderr


def test_dependency_layer_leaves_the_images_own_alone(image):
    bench, python = image.parents[3] / "bench", image.parents[2] / "bin/python"
    extras = {x for path in DOCKERFILES for x in re.search(INSTALL, path.read_text())[1].split()}
    assert {"energy", "fp8"} <= extras  # of any image: the union installs, so each image's do
    install(image, *sorted(extras))
    lines = (bench / "after.txt").read_text().splitlines()
    after = dict(line.lower().split("==") for line in lines)
    assert after.items() >= VENDORS.items()
    assert {"pyyaml", "pydantic", "rich", "tensorboard", "torchao", "nvidia-ml-py"} <= set(after)
    assert (bench / "torch.version").read_text().strip() == VENDORS["torch"]
    # Scripts that need no torch run there, with the code of what was installed.
    ours = after.keys() - {"torch", "transformer_engine", "wandb"}
    files = itertools.chain(*(importlib.metadata.files(name) or () for name in ours))
    for top in {file.parts[0] for file in files} - {".."}:
        if not (image / top).exists():
            (image / top).symlink_to(OUR_SITE / top)
    for command in ("estimate.py configs/gpt2-125m.json --gpu h100", "compare.py --help"):
        ran = subprocess.run([python, *words(command)], cwd=ROOT, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
    # HEALTHCHECK's own command, against this layer.
    (check,) = re.findall(r"HEALTHCHECK .* CMD (\[.*\])", (ROOT / "docker/Dockerfile").read_text())
    code = json.loads(check)[2].replace("/opt/bench", str(bench))
    assert subprocess.run([python, "-c", code]).returncode == 0


OLD, LEFT = "torchao==0.14.0+git1", "install.sh: left out torchao>=0.15: the image "
THEIRS = importlib.metadata.version("protobuf")
TOO_OLD = "install.sh: the image has pydantic 1.10.0, and pydantic>=2 is needed: "


@pytest.mark.parametrize(
    ("has", "pins", "said", "stays"),
    [(OLD, f"{OLD}  # built here\n", f"{LEFT}has torchao 0.14.0+git1\n", True),
     (OLD, "", f"{LEFT}has torchao 0.14.0+git1\n", True),
     ("torchao==0.14.0", "# none\n-i x\ntorchao==0.14.0\n", f"{LEFT}pins torchao==0.14.0\n", False),
     ("torchao==0.15.0+gite9c7bead9", "", "", True),  # AMD's
     # What is installed wins over a pin; pip alone would go back from the first to the second.
     (f"protobuf=={THEIRS}.post1", f"protobuf=={THEIRS}\n", "", True),
     ("pydantic==1.10.0", "pydantic==1.10.0\n", f"{TOO_OLD}choose a newer BASE_IMAGE\n", None)],
)  # fmt: skip
def test_what_the_image_has_stays(has, pins, said, stays, image, tmp_path):
    """What contradicts it is left out; the build fails where the project itself needs another version."""
    (tmp_path / "constraint.txt").write_text(pins)
    name, version = has.split("==")
    if stays is not False:  # else it is only pinned
        put(image, name, version)
    constraint = {"PIP_CONSTRAINT": str(tmp_path / "constraint.txt")}
    assert install(image, "fp8", "energy", fails=stays is None, **constraint) == said
    if stays is not None:
        after = (tmp_path / "bench/after.txt").read_text().splitlines()
        assert [x for x in after if x.startswith(f"{name}==")] == [has] * stays
        assert any(x.startswith("nvidia-ml-py==") for x in after)


def test_build_fails_where_something_of_the_image_would_be_replaced_or_is_too_old(image):
    """A requirement that the vendor's version does not meet ends the build; nothing is changed."""
    error = install(image, fails=True, REQUIRE="torch<2.14")  # others would serve
    assert "torch" in error and "pip replaced" not in error
    (torch_info,) = image.glob("torch-*")
    assert torch_info.name == f"torch-{VENDORS['torch']}.dist-info"
    # Even if pip let it through: the versions before and after are compared.
    wrapper = image.parents[3] / "python"
    metadata = image / "transformer_engine-2.19.0+abc.dist-info/METADATA"
    wrapper.write_text(
        f'#!/bin/sh\nif [ "$2" = pip ]; then sed -i s/2.19.0+abc/9.9/ "{metadata}"; exit 0; fi\n'
        f'exec "{image.parents[2]}/bin/python" "$@"\n'
    )
    wrapper.chmod(0o755)
    error = install(image, fails=True, PYTHON=str(wrapper))
    assert "pip replaced what belongs to the image" in error
    assert "transformer_engine==2.19.0+abc" in error
    metadata = torch_info / "METADATA"
    metadata.write_text(metadata.read_text().replace(VENDORS["torch"], "2.10.0+rocm7"))
    error = install(image, fails=True)
    assert "install.sh: the image has torch 2.10.0+rocm7, and 2.11 is needed" in error


# --- launch.sh -------------------------------------------------------------------------------------


def test_a_first_start(ready):
    command = ["python", "train.py", "configs/a b.json", "--bsz", "2"]
    call = ready.starts(command)
    assert call[:2] == ["docker", "run"]
    assert {"--rm", "--init", "--pull=never", "--ipc=host"} <= set(call)
    assert values(call, "--gpus") == ["all"]
    assert values(call, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert "memlock=-1" in values(call, "--ulimit")
    mounts = values(call, "--mount")
    assert f"type=bind,src={ROOT},dst={WORK}" in mounts
    assert f"type=bind,src={ROOT}/runs,dst={WORK}/runs" in mounts
    assert any(m.endswith(",dst=/cache") for m in mounts) and values(call, "--workdir") == [WORK]
    variables = values(call, "-e")
    head = provenance.source_revision()["git_sha"] or ""  # of the mounted tree
    assert {"BENCH_IMAGE_NAME=llm-train-bench:nvidia", "BENCH_IMAGE_DIGEST=example.com/bench@sha256:abc",
            "HOME=/cache/home", f"BENCH_GIT_SHA={head}"} <= set(variables)  # fmt: skip
    assert any(variable.startswith("USER=") for variable in variables)
    # The command, its spaces kept, comes last.
    image = call.index("llm-train-bench:nvidia")
    assert call[image + 1 :] == ["bash", "-c", 'exec "$@"', "bash", *command]
    assert (ready.home / ".cache/llm-train-bench/llm-train-bench_nvidia/home").is_dir()
    # Without a command it is a shell; there is no terminal here.
    call = ready.starts()
    assert call[-1] == "bash" and "-t" not in call


LINES = (ROOT / "tests/launches.txt").read_text().format(root=ROOT, work=WORK).splitlines()
ROWS = [[part.strip() for part in line.split("|")] for line in LINES if line[0] != "#"]
STARTS, REFUSALS = ([row for row in ROWS if len(row) == n] for n in (4, 5))
HOST = dict(HIP_PATH="/opt/rocm", TORCH_HOME="/x", HF_TOKEN="secret", HIP_LAUNCH_BLOCKING="1",
            NCCL_DEBUG="INFO", NNODES="2", PORT="1", CUDA_VISIBLE_DEVICES="1", FI_PROVIDER="efa",
            UCX_TLS="tcp", CUDA_DEVICE_MAX_CONNECTIONS="1", WANDB_API_KEY="secret", HF_HOME="/x",
            HF_HUB_CACHE="/x", NCCL_CONF_FILE="/x", MINE="1")  # fmt: skip


@pytest.mark.parametrize("state, argv, flag, there", STARTS)
def test_what_a_container_is_started_with(state, argv, flag, there, ready):
    if state:
        name, _, text = state.partition(" ")
        (ready.state / name).write_text(f"{text}\n")
    arguments = values(ready.starts(argv, "true", **HOST), flag)
    for word in there.split():
        assert (word.lstrip("!") in arguments) == (word[0] != "!"), word


def test_no_value_of_a_variable_is_shown(ready, tmp_path):
    """They may be keys: not in a dry run, nor in the engine's command line, nor in a result."""
    (tmp_path / "env").write_text("C_KEY=sesame\n")
    argv = words("--env A_KEY=sesame --env B_KEY --env-file", tmp_path / "env")
    secrets = {"B_KEY": "sesame", "WANDB_API_KEY": "sesame"}
    code, out, error = ready.launch("--dry-run", argv, "true", **secrets)
    assert code == 0 and "A_KEY" in out and "WANDB_API_KEY" in out and "sesame" not in out + error
    assert "sesame" not in str(ready.starts(argv, "true", **secrets))
    named = {"NCCL_AUTH_KEY": "sesame", "FI_TOKEN": "sesame", "HF_TOKEN": "sesame"} | secrets
    with mock.patch.dict(os.environ, named):
        assert "sesame" not in str(provenance.describe_environment(torch.device("cpu")))


def test_variables_of_the_user_have_any_name_and_replace_others(ready, tmp_path):
    """Also names of variables of the launcher, which goes its way.

    An engine prefers -e to a file, and values are in files: no -e may name them too.
    """
    names = ("name", "repo", "image", "gpus", "cache", "args", "BENCH_IMAGE")
    argv = words(*(f"--env {name}=/etc" for name in names), "--gpus 1 --env PATH=/nowhere true")
    call, given = ready.starts(argv), ready.state / "given"
    assert values(call, "--env-file") == ["/dev/fd/9"] and "llm-train-bench:nvidia" in call
    expected = [*(f"{name}=/etc" for name in names), "PATH=/nowhere"]
    assert given.read_text().splitlines() == expected
    assert values(call, "--gpus") == ['"device=1"']
    assert f"type=bind,src={ROOT},dst={WORK}" in values(call, "--mount")
    file, comma = tmp_path / "env", tmp_path / "a,b"
    file.write_text("# mine\r\n\nHF_HOME=/file\r\n  NCCL_DEBUG=INFO\nMINE\nA=1=2\nA=3")
    argv = words("--cpu --env-file", file, "--env TRITON_CACHE_DIR=/t --env HF_HOME=/mine true")
    call = ready.starts(argv, MINE="1", NCCL_DEBUG="WARN", NCCL_ALGO="Ring")
    expected = "HF_HOME=/file NCCL_DEBUG=INFO A=1=2 A=3 TRITON_CACHE_DIR=/t HF_HOME=/mine".split()
    assert given.read_text().splitlines() == expected
    named = {word.partition("=")[0] for word in values(call, "-e")}
    assert {"MINE", "NCCL_ALGO", "USER", "XDG_CACHE_HOME"} <= named
    assert not named & {"HF_HOME", "NCCL_DEBUG", "A", "TRITON_CACHE_DIR"}
    file.write_text("A=1\nexport B=2\n")
    message = f"--env-file {file}: line 2: must be NAME or NAME=VALUE"
    ready.refuses(2, message, "--env-file", file, "true")
    comma.touch()
    message = "a,b: a path with a comma or quote cannot be mounted"
    ready.refuses(2, message, "true", LLM_TRAIN_BENCH_HARDWARE=str(comma))


@pytest.mark.parametrize("name", ["NCCL_TOPO_FILE", "LLM_TRAIN_BENCH_HARDWARE"])
def test_files_that_variables_name_are_mounted(ready, tmp_path, name):
    file = tmp_path / "file"
    file.touch()
    call = ready.starts("true", **{name: str(file)})
    assert f"type=bind,src={file},dst={file},readonly" in values(call, "--mount")
    assert name in values(call, "-e")
    message = f"{name}=topology.xml: must be the whole path of a file here"
    ready.refuses(2, message, "true", **{name: "topology.xml"})


@pytest.mark.parametrize("script", [NVIDIA, AMD])
def test_a_dry_run_needs_no_engine_no_gpu_and_no_image(machine, script):
    """It says what is not here, and prints the line all the same; without --dry-run it fails."""
    code, out, error = machine.launch("--dry-run --gpus 0,1 python x.py", script=script)
    assert code == 0 and out.startswith("docker run ") and out.rstrip().endswith("python x.py")
    help_text = machine.launch("-h", script=script)[1]
    assert all(t in help_text for t in ("--dry-run", f"docker/{script}", "Build the image"))
    assert error.count("not here: ") == 3 and "no docker or podman" in error
    assert machine.launch("ls", script=script)[0] == 1
    machine.podman()
    assert machine.launch("--dry-run ls", script=script)[1].startswith("podman run ")


def test_dry_run_prints_the_line_that_would_run(ready, tmp_path):
    where = tmp_path / "some where"
    code, out, _ = ready.launch("--dry-run --output", where, "python", ["a b.py"])
    assert code == 0 and ready.calls("run") == []
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {out}"], capture_output=True, text=True)
    assert words.stdout.splitlines()[:2] == ["docker", "run"]
    assert f"type=bind,src={where},dst=/workspace/llm-train-bench/runs" in words.stdout
    assert words.stdout.splitlines()[-1] == "a b.py"
    assert not (ready.home / ".cache").exists() and not where.exists()


def test_re_entry_runs_in_the_container_that_is_there(ready):
    (ready.state / "container").write_text(f"true|llm-train-bench:nvidia|{ROOT}")
    call = ready.starts("nvidia-smi -L", NNODES="2")
    assert "entering it" in ready.error
    # It runs on the image it was started with; the name may mean another one now.
    assert not any(v.startswith("BENCH_IMAGE") for v in values(call, "-e"))
    assert call[:3] == ["docker", "exec", "-i"] and call[-2:] == ["nvidia-smi", "-L"]
    assert "NNODES" in values(call, "-e")
    assert call[call.index("bash") :][:4] == ["bash", "-c", 'exec "$@"', "bash"]
    assert ready.calls("start") == []
    (ready.state / "container").write_text(f"false|llm-train-bench:nvidia|{ROOT}")
    (ready.state / "no_image").touch()  # it runs, even if its tag is gone
    assert ready.starts("true")[1] == "exec" and len(ready.calls("start")) == 1
    for name in ("localhost/other:1", "docker.io/library/other:1"):  # in full
        (ready.state / "container").write_text(f"true|{name}|{ROOT}")
        ready.starts("--image other:1 true")
        assert ready.launch("true", BENCH_IMAGE="another:1")[0] == 1


def test_what_a_running_container_cannot_follow_is_refused(ready):
    for argv, tree, message in (
        ("--gpus 0", ROOT, "--gpus: container llm-train-bench-"),
        ("--output /tmp/x", ROOT, "--output: container"),
        ("--mount /etc", ROOT, "--mount: container"),
        ("--image other:1", ROOT, "of llm-train-bench:nvidia"),
        ("", "/another/clone", "is of another tree, /another/clone"),
    ):
        (ready.state / "container").write_text(f"true|llm-train-bench:nvidia|{tree}")
        ready.refuses(1, message, argv, "true")
        ready.refuses(1, "--name starts another", argv, "true")


def test_without_a_home_or_a_name_and_with_little_memory_to_lock(ready):
    ready.put("id", '#!/bin/sh\n[ "$1" = -un ] && exit 1\nexec /usr/bin/id "$@"\n')
    del ready.environment["HOME"]
    # Rootless docker asks for no more than there is.
    (ready.state / "security").write_text("[name=rootless]")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    small = limit if limit != resource.RLIM_INFINITY else 8 << 20
    call = ready.starts("--cache", ready.home, "true", before=f"ulimit -l {small // 1024}")
    assert values(call, "--ulimit") == ["stack=67108864"]
    assert values(call, "--name") == [f"llm-train-bench-{os.getuid()}-nvidia"]
    assert ready.error == "" and ready.launch("-h")[0] == 0


def test_nodes_wait_for_the_first(machine):
    """Each node also knows if it is the one where all meet."""
    machine.put("python", '#!/bin/sh\necho "$@"\n')
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        where = {"NNODES": "2", "HEAD": "127.0.0.1", "PORT": port, "JOB_ID": "k3v"}
        where |= {"script": "torchrun_node.sh"}
        for node, is_host in (("0", 1), ("1", 0), ("", None)):
            conf = f"--rdzv-conf is_host={is_host} " if node else ""
            code, out, _ = machine.launch("train_fsdp.py x.json", NODE=node, **where)
            assert code == 0 and f":{port} {conf}train_fsdp.py x.json" in out
            assert "--rdzv-id k3v" in out
    where |= {"JOB_COMPLETION_INDEX": "1", "WAIT": "2"}
    code, _, error = machine.launch("train_fsdp.py x.json", **where)
    message = f"nothing answers at 127.0.0.1:{port} after 2 s; is node 0 up?"
    assert (code, error) == (1, f"torchrun_node.sh: {message}\n")


def test_podman(machine):
    machine.podman()
    machine.nvidia(2)
    machine.file("/etc/cdi/nvidia.yaml")
    call = machine.starts("--gpus 1 true")
    assert call[0] == "podman" and values(call, "--device") == ["nvidia.com/gpu=1"]
    assert "--gpus" not in call and "label=disable" in values(call, "--security-opt")
    assert values(call, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert "--userns=keep-id" in call or os.getuid() == 0
    # Its --init needs a program that may be absent.
    assert "--init" not in call and machine.error.count("\n") == 1
    assert "sudo apt-get install catatonit" in machine.error
    machine.file("/usr/libexec/podman/catatonit")
    assert "--init" in machine.starts("true") and machine.error == ""


def test_rdma_devices_where_there_are_any(ready):
    assert "/dev/infiniband" not in ready.starts("true")
    ready.file("/dev/infiniband/uverbs0")
    ready.file("/sys/class/infiniband/mlx5_0")
    call = ready.starts("true")
    assert "/dev/infiniband" in values(call, "--device")
    assert "IPC_LOCK" in values(call, "--cap-add")


SITUATIONS = {
    "no engine": lambda m: (m.path / "docker").unlink(),
    "no GPU": lambda m: m.nvidia(0),
    "one GPU": lambda m: m.nvidia(1),
    "no toolkit": lambda m: (m.nvidia(1), (m.state / "runtimes").write_text("{}")),
    "no image": lambda m: (m.nvidia(1), (m.state / "no_image").touch()),
    "no daemon": lambda m: (m.state / "info_error").write_text("Cannot connect\n"),
    "no right": lambda m: (m.state / "info_error").write_text("permission denied\n"),
    "kfd alone": lambda m: m.file("/dev/kfd"),
    "two of AMD": lambda m: m.amd(2),
    "podman": lambda m: (m.podman(), m.nvidia(2)),
    "a job": lambda m: m.slurm("lxc"),
}


@pytest.mark.parametrize("situation, script, text, code, message", REFUSALS)
def test_what_is_missing_is_one_line(situation, script, text, code, message, machine):
    machine.engine()
    if situation:
        SITUATIONS[situation](machine)
    argv = text.replace("+", "\n").split(" ") if text else []
    argv += ["true"] * (argv != ["--image"])
    machine.refuses(int(code), message, argv, script=script)
    assert machine.launch(argv, script=script)[2].startswith(f"{script}: ")


def test_amd_start(machine):
    """Eight MI300X outside virtual machines have 64 render nodes; the driver's topology maps them."""
    machine.engine()
    machine.amd(64)
    place = "/sys/class/kfd/kfd/topology/nodes/{}/properties".format
    properties = "simd_count {}\ngfx_target_version {}\ndrm_render_minor {}\n".format
    for node in range(10):  # two CPUs come first
        gpu = (1216, 90402, 112 + 8 * node) if node > 1 else (0, 0, 0)
        machine.file(place(node), f"cpu_cores_count 0\n{properties(*gpu)}")
    machine.file("/proc/sys/kernel/numa_balancing", "1\n")
    group = 4711
    if os.getuid() == 0:
        os.chown(machine.root / "dev/kfd", 0, group)
        (machine.root / "dev/kfd").chmod(0o660)
    call = machine.starts("true", script=AMD, NCCL_IB_HCA="mlx5")
    assert "sudo sysctl kernel.numa_balancing=0" in machine.error
    assert values(call, "--device")[:2] == ["/dev/kfd", "/dev/dri"] and "--gpus" not in call
    assert "seccomp=unconfined" in values(call, "--security-opt")
    assert values(call, "--env-file") == [str(ROOT / "docker/amd.env")]
    assert "NCCL_MIN_NCHANNELS=112" in values(call, "-e") and "NCCL_IB_HCA" in values(call, "-e")
    if os.getuid() == 0:
        assert values(call, "--group-add") == [str(group)]
    call = machine.starts("--gpus 0,7 true", script=AMD)
    assert values(call, "--device") == ["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD184"]
    assert "NCCL_MIN_NCHANNELS=112" not in values(call, "-e")
    machine.file(place(9), properties(1216, 90500, 184))  # MI350: advice for MI300X is not for it
    assert "NCCL_MIN_NCHANNELS=112" not in values(machine.starts("true", script=AMD), "-e")


def test_amd_settings_are_each_explained_and_recorded():
    lines = (ROOT / "docker/amd.env").read_text().splitlines()
    named = [line for line in lines if line and not line.startswith("#")]
    assert "DISABLE_ADDMM_HIP_LT=0" in named
    for line in named:
        assert re.fullmatch(r"[A-Z0-9_]+=\S+", line) and line.startswith(provenance.SETTINGS), line
        before = lines[lines.index(line) - 1]
        assert before.startswith("#") or before in named, f"{line} has no reason before it"


# --- many machines ---------------------------------------------------------------------------------


def manifests(name: str) -> list[dict]:
    return list(yaml.safe_load_all((ROOT / "docker" / name).read_text()))


SCHEMAS = dict(
    Service="service-v1", Job="job-batch-v1", JobSet="jobset-jobset.x-k8s.io-v1alpha2",
    TrainJob="trainjob-trainer.kubeflow.org-v1alpha1",
    TrainingRuntime="trainingruntime-trainer.kubeflow.org-v1alpha1",
)  # fmt: skip
KUBERNETES = sorted(path.name for path in ROOT.glob("docker/kubernetes-*.yaml"))


@pytest.mark.parametrize("name", KUBERNETES)
def test_manifests_are_valid(name):
    for manifest in manifests(name):
        schema = (ROOT / f"tests/schemas/{SCHEMAS[manifest['kind']]}.json.gz").read_bytes()
        validator = jsonschema.Draft7Validator(json.loads(gzip.decompress(schema)))
        assert not [e.message for e in validator.iter_errors(manifest)]
        # The schema refuses what is wrong.
        manifest["spec"]["nodes"] = 2
        assert list(validator.iter_errors(manifest))


def pod_of(job_spec: dict) -> tuple[dict, dict]:
    """A job's one container and its environment. That it saved and stopped on request is no failure."""
    (container,) = job_spec["template"]["spec"]["containers"]
    rules = job_spec["podFailurePolicy"]["rules"]
    (ignored,) = [rule["onExitCodes"] for rule in rules if "onExitCodes" in rule]
    assert ignored == {"containerName": container["name"], "operator": "In", "values": [PREEMPTED]}
    return container, {e["name"]: e.get("value") for e in container.get("env", ())}


def test_manifests_agree_with_themselves_and_each_other():
    """Where the pods meet, restarts, and the same command as the Job's."""
    service, job = manifests("kubernetes-job.yaml")
    container, environment = pod_of(job["spec"])
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(environment["NNODES"])
    assert environment["HEAD"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert container["image"].endswith(environment["BENCH_IMAGE_DIGEST"])
    (jobset,) = manifests("kubernetes-jobset.yaml")
    runtime, trainjob = manifests("kubernetes-trainjob.yaml")
    runs_in = dict(kind=runtime["kind"], name=runtime["metadata"]["name"])
    assert trainjob["spec"]["runtimeRef"] == runs_in
    trainer = trainjob["spec"]["trainer"]
    assert trainer["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"]
    for spec in (jobset["spec"], runtime["spec"]["template"]["spec"]):
        (rule,) = spec["failurePolicy"]["rules"]
        assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
        inner, _ = pod_of(spec["replicatedJobs"][0]["template"]["spec"])
        assert {"/dev/shm", f"{WORK}/runs"} == {m["mountPath"] for m in inner["volumeMounts"]}
    (node,), name = jobset["spec"]["replicatedJobs"], jobset["metadata"]["name"]
    inner, environment = pod_of(node["template"]["spec"])
    assert trainer["args"] == inner["args"] == container["args"]
    assert inner["command"] == container["command"]
    assert environment["HEAD"] == f"{name}-{node['name']}-0-0.{name}"
    assert node["template"]["spec"]["completions"] == int(environment["NNODES"])
    # The command of a TrainJob, with what Trainer sets.
    sizes = dict(NNODES="2", MASTER_ADDR="h", MASTER_PORT="1", NODE_RANK="1", NPROC_PER_NODE="8")
    variables = os.environ | {f"PET_{name}": value for name, value in sizes.items()}
    shown = """bash -c 'printf "%s " $NNODES $HEAD $PORT $NODE $GPUS "$@"' x "$@\""""
    line = trainer["command"][2].replace('exec bash docker/torchrun_node.sh "$@"', shown)
    command = ["bash", "-c", line, "bash", "a b"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.stdout == "2 h 1 1 8 a b ", done.stderr


@pytest.mark.parametrize("kind", ["none", "pyxis", "docker"])
def test_slurm_variants(kind, machine):
    machine.slurm(kind)
    command, image = ["train_fsdp.py", "configs/a b.json"], {}
    if kind == "pyxis":
        code, _, error = machine.launch(command, script="slurm.sbatch")
        assert code != 0 and "a .sqsh file" in error
        image = {"IMAGE": "/shared/bench.sqsh"}
    code, _, error = machine.launch(command, script="slurm.sbatch", **image)
    assert code == 0, error
    exported, argv = (machine.state / "environment").read_text().splitlines(), machine.calls()[0]
    assert {"MASTER_ADDR=node7", "MASTER_PORT=29734"} <= set(exported)
    assert argv[-2:] == command
    assert ("--container-image=/shared/bench.sqsh" in argv) == (kind == "pyxis")
    if kind == "docker":
        assert {"NNODES=2", "HEAD=node7", "PORT=29734"} <= set(exported)
        assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= set(argv)
        assert "docker/launch.sh" in argv and "docker/torchrun_node.sh" in argv
        assert machine.calls()[-1][-3:] == ["rm", "-f", "llm-train-bench-1234"]


@pytest.mark.parametrize("kind, code, preempted, again", [
    ("none", 75, "None", True), ("docker", 75, "None", True), ("none", 143, "2026-11-26T18:00:00", True),
    ("none", 1, "None", False), ("docker", 1, "None", False), ("none", 143, "None", False),
])  # fmt: skip
def test_slurm_queues_a_job_again_that_saved_or_was_preempted(
    kind, code, preempted, again, machine
):
    machine.slurm(kind, code, preempted)
    assert machine.launch("train_ddp.py x.json", script="slurm.sbatch")[0] == code
    assert ("requeue 1234" in (machine.state / "scontrol").read_text()) is again


@mock.patch.dict(
    os.environ, BENCH_IMAGE_NAME="x:1", BENCH_IMAGE_DIGEST="y", BENCH_GIT_SHA="1234abcd"
)
def test_the_image_is_in_the_result_and_knows_its_revision_without_history(tmp_path, monkeypatch):
    image = provenance.describe_environment(torch.device("cpu"))["image"]
    assert image == {"name": "x:1", "digest": "y"} and provenance.container_image({}) is None
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.source_revision.__wrapped__() == {"git_sha": "1234abcd", "git_dirty": None}
