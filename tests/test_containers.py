"""Containers without an engine: linters, launch scripts against a recording docker, manifests, layers."""

import atexit
import functools
import gzip
import itertools
import json
import os
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import jsonschema
import pytest
import yaml

from llm_train_bench.run.failures import PREEMPTED
from llm_train_bench.run.provenance import container_image, source_revision
from tests.helpers import ROOT

BIN = Path(sys.executable).parent
# A first line may hold neither spaces nor more than 127 characters; the shell's line, which is a
# string to Python, may.
PYTHON = f"""#!/bin/sh
'''exec' "{sys.executable}" "$0" "$@"
' '''
"""
DOCKERFILES = sorted(ROOT.glob("docker/Dockerfile*"))
SCRIPTS = [*sorted(ROOT.glob("docker/*.sh")), ROOT / "docker/slurm.sbatch"]
ENGINE = """{python}import json, os, sys
from pathlib import Path
here, argv = Path({state!r}), sys.argv[1:]
with (here / "calls.jsonl").open("a") as f:
    f.write(json.dumps([os.path.basename(sys.argv[0]), *argv]) + "\\n")
said = " ".join(argv)
if argv[0] == "--version":
    print({version!r})
elif argv[0] == "info":
    if (here / "info_error").exists():
        sys.exit((here / "info_error").read_text())
    if "Runtimes" in said:
        print((here / "runtimes").read_text() if (here / "runtimes").exists() else '{{"nvidia": {{}}}}')
    if "SecurityOptions" in said:
        print((here / "security").read_text() if (here / "security").exists() else "[name=seccomp]")
elif argv[:2] == ["image", "inspect"]:
    if (here / "no_image").exists():
        sys.exit(1)
    if (here / "images").exists() and argv[-1] not in (here / "images").read_text().split():
        sys.exit(1)
    print("example.com/bench@sha256:abc" if "RepoDigests" in said else "[]")
elif argv[:2] == ["container", "inspect"]:
    if not (here / "container").exists():
        sys.exit(1)
    print((here / "container").read_text())
"""


# Tools that a stranger's machine may have. The simulated one has them only where a test puts them.
NOT_PLAIN = (
    "docker",
    "podman",
    "nvidia",
    "rocm",
    "amd-smi",
    "srun",
    "scontrol",
    "kubectl",
    "nerdctl",
)


@functools.cache
def plain_tools() -> Path:
    """A directory with this machine's tools, without engines, drivers' tools and launchers."""
    directory = Path(tempfile.mkdtemp(prefix="llm-train-bench-tools-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for place in (Path("/usr/bin"), Path("/bin")):
        for tool in place.iterdir():
            link = directory / tool.name
            if not tool.name.startswith(NOT_PLAIN) and not link.is_symlink():
                link.symlink_to(tool)
    return directory


class Machine:
    """A simulated machine: an engine that records, GPUs, a root for /dev, /sys and /proc."""

    def __init__(self, tmp_path: Path):
        self.path = tmp_path / "bin"
        self.state, self.root, self.home = (tmp_path / n for n in ("state", "root", "home"))
        for directory in (self.path, self.state, self.root, self.home):
            directory.mkdir()
        self.environment = {
            "PATH": f"{self.path}:{plain_tools()}", "HOME": str(self.home), "USER": "someone",
            "BENCH_TEST_ROOT": str(self.root),
        }  # fmt: skip

    def put(self, name: str, text: str) -> None:
        file = self.path / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def engine(self, name: str = "docker", version: str = "Docker version 28.2.2") -> None:
        text = ENGINE.format(python=PYTHON, state=str(self.state), version=version)
        self.put(name, text)

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

    def launch(self, *argv: str, script: str = "launch.sh", **environment: str):
        done = subprocess.run(
            ["bash", str(ROOT / "docker" / script), *argv], env=self.environment | environment,
            capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    def calls(self, *verbs: str) -> list[list[str]]:
        path = self.state / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [call for call in map(json.loads, lines) if not verbs or call[1] in verbs]

    def started(self) -> list[str]:
        (call,) = self.calls("run", "exec")
        return call


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def ready(machine):
    """Docker, its toolkit and two NVIDIA GPUs."""
    machine.engine()
    machine.nvidia(2)
    return machine


def values(call: list[str], flag: str) -> list[str]:
    return [b for a, b in itertools.pairwise(call) if a == flag]


# --- linters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_hadolint(path):
    done = subprocess.run([BIN / "hadolint", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_shellcheck():
    command = [BIN / "shellcheck", "-x", *map(str, SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_images_are_pinned_labelled_and_not_root(path):
    text = path.read_text()
    assert re.search(r"^ARG BASE_IMAGE=\S+:\S+$", text, re.M) and ":latest" not in text
    assert re.findall(r"^USER (\S+)$", text, re.M)[-1] == "1000:1000"
    assert "HEALTHCHECK" in text and "org.opencontainers.image.revision" in text
    # The code and the revision come after the dependencies, so that these stay cached.
    assert (
        text.index("install.sh /opt/bench/pyproject")
        < text.index("COPY . ")
        < text.index("ARG GIT_SHA=")
    )


def test_dockerignore_keeps_out_what_is_large_or_private():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "runs", "data"} <= set(ignored)


# --- the dependency layer --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A virtual environment that stands for a vendor's image, with the vendor's torch and numpy."""
    directory = tmp_path_factory.mktemp("image")
    subprocess.run([sys.executable, "-m", "venv", directory / "venv"], check=True)
    site = next((directory / "venv/lib").glob("python*/site-packages"))
    for name, version in (
        ("torch", "2.14.0a0+b2c75dd062.nv26.09"),
        ("transformer_engine", "2.19.0+abc"),
    ):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("vendor\n")
    python = directory / "venv/bin/python"
    pinned = (ROOT / "constraints.txt").read_text()
    (numpy,) = re.findall(r"^numpy==\S+$", pinned, re.M)
    subprocess.run([python, "-m", "pip", "install", "-q", numpy], check=True, capture_output=True)
    return directory, python, numpy


def install(image, *extras, **environment):
    directory, python, _ = image
    command = ["bash", str(ROOT / "docker/install.sh"), str(ROOT / "pyproject.toml")]
    return subprocess.run(
        [*command, str(directory / "bench"), *extras], capture_output=True, text=True,
        env=os.environ | {"PYTHON": str(python), "PIP_NO_COMPILE": "1"} | environment,
    )  # fmt: skip


def test_dependency_layer_leaves_the_images_own_alone(image):
    directory, python, numpy = image
    done = install(image, "energy", "fp8")
    assert done.returncode == 0, done.stderr
    after = (directory / "llm_train_bench/after.txt").read_text().splitlines()
    assert "torch==2.14.0a0+b2c75dd062.nv26.09" in after and numpy in after
    assert "transformer_engine==2.19.0+abc" in after
    names = {line.split("==")[0].lower() for line in after}
    assert {"tyro", "pydantic", "rich", "tensorboard", "torchao", "nvidia-ml-py"} <= names
    version = (directory / "llm_train_bench/torch.version").read_text().strip()
    assert version == "2.14.0a0+b2c75dd062.nv26.09"
    # Scripts that need no torch run there.
    for command in (
        ["estimate.py", "configs/gpt2-125m.json", "--gpu", "h100"],
        ["compare.py", "--help"],
    ):
        ran = subprocess.run([python, *command], cwd=ROOT, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
    # HEALTHCHECK's own command, against this layer.
    (check,) = re.findall(r"HEALTHCHECK .* CMD (\[.*\])", (ROOT / "docker/Dockerfile").read_text())
    code = json.loads(check)[2].replace("/opt/bench", str(directory / "bench"))
    assert subprocess.run([python, "-c", code]).returncode == 0


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.name)
def test_each_images_extras_install(path, image):
    (extras,) = re.findall(
        r"install\.sh /opt/bench/pyproject\.toml /opt/bench (.*)", path.read_text()
    )
    done = install(image, *extras.split())
    assert done.returncode == 0, done.stderr


def test_build_fails_where_the_images_torch_is_too_old(image):
    directory, *_ = image
    (info,) = (directory / "venv/lib").glob("python*/site-packages/torch-*.dist-info/METADATA")
    text = info.read_text()
    info.write_text(text.replace("2.14.0a0+b2c75dd062.nv26.09", "2.10.0+rocm7"))
    try:
        done = install(image)
    finally:
        info.write_text(text)
    assert done.returncode != 0
    assert "install.sh: the image has torch 2.10.0+rocm7, and 2.11 is needed" in done.stderr


def test_build_fails_where_something_would_replace_torch(image):
    """A requirement that the vendor's version does not meet ends the build; nothing is changed."""
    done = install(image, REQUIRE="torch<2.14")  # others would serve
    assert done.returncode != 0
    assert "torch" in done.stderr and "pip replaced" not in done.stderr
    python = image[1]
    code = "import importlib.metadata as m; print(m.version('torch'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout
    assert found.strip() == "2.14.0a0+b2c75dd062.nv26.09"


def test_build_fails_where_something_was_replaced(image, tmp_path):
    """Even if pip let it through: the versions before and after are compared."""
    directory, python, _ = image
    wrapper = tmp_path / "python"
    site = next((directory / "venv/lib").glob("python*/site-packages"))
    info = site / "transformer_engine-2.19.0+abc.dist-info/METADATA"
    wrapper.write_text(
        f'#!/bin/sh\nif [ "$2" = pip ]; then sed -i s/2.19.0+abc/9.9/ "{info}"; exit 0; fi\n'
        f'exec "{python}" "$@"\n'
    )
    wrapper.chmod(0o755)
    try:
        done = install((directory, wrapper, None))
    finally:
        info.write_text(info.read_text().replace("9.9", "2.19.0+abc"))
    assert done.returncode == 1 and "pip replaced what belongs to the image" in done.stderr
    assert "transformer_engine==2.19.0+abc" in done.stderr


# --- launch.sh -------------------------------------------------------------------------------------


def test_a_first_start(ready):
    code, _, error = ready.launch("python", "train.py", "configs/a b.json", "--bsz", "2")
    assert code == 0, error
    call = ready.started()
    assert call[:2] == ["docker", "run"] and {
        "--rm",
        "--init",
        "--pull=never",
        "--ipc=host",
    } <= set(call)
    assert values(call, "--gpus") == ["all"]
    assert values(call, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert "memlock=-1" in values(call, "--ulimit")
    mounts = values(call, "--mount")
    work = "/workspace/llm-train-bench"
    assert f"type=bind,src={ROOT},dst={work}" in mounts
    assert f"type=bind,src={ROOT}/runs,dst={work}/runs" in mounts
    assert any(m.endswith(",dst=/cache") for m in mounts) and values(call, "--workdir") == [work]
    given = values(call, "-e")
    assert {"BENCH_IMAGE_NAME=llm-train-bench:nvidia", "BENCH_IMAGE_DIGEST=example.com/bench@sha256:abc",
            "HOME=/cache/home"} <= set(given)  # fmt: skip
    assert any(e.startswith("USER=") for e in given)
    # The command, its spaces kept, comes last.
    image = call.index("llm-train-bench:nvidia")
    assert call[image + 1 :] == ["bash", "-c", 'exec "$@"', "bash", "python", "train.py",
                                 "configs/a b.json", "--bsz", "2"]  # fmt: skip
    assert (ready.home / ".cache/llm-train-bench/llm-train-bench_nvidia/home").is_dir()


def test_without_a_command_it_is_a_shell(ready):
    assert ready.launch()[0] == 0
    assert ready.started()[-1] == "bash" and "-t" not in ready.started()  # no terminal here


@pytest.mark.parametrize("script", ["launch.sh", "launch_amd.sh"])
def test_a_dry_run_needs_no_engine_no_gpu_and_no_image(machine, script):
    """It says what is not here, and prints the line all the same; without --dry-run it fails."""
    code, out, error = machine.launch("--dry-run", "--gpus", "0,1", "python", "x.py", script=script)
    assert code == 0 and out.startswith("docker run ") and out.rstrip().endswith("python x.py")
    assert error.count("not here: ") == 3 and "no docker or podman" in error
    assert machine.launch("ls", script=script)[0] == 1
    machine.engine("podman", "podman version 5.1")
    assert machine.launch("--dry-run", "ls", script=script)[1].startswith("podman run ")


def test_images_of_the_first_project_s_names_are_found(ready):
    (ready.state / "images").write_text("llm-train-bench\n")
    assert ready.launch("ls")[0] == 0 and "BENCH_IMAGE_NAME=llm-train-bench" in ready.started()


def test_dry_run_prints_the_line_that_would_run(ready, tmp_path):
    where = tmp_path / "some where"
    code, out, _ = ready.launch("--dry-run", "--output", str(where), "python", "a b.py")
    assert code == 0 and ready.calls("run") == []
    words = subprocess.run(["bash", "-c", f"printf '%s\\n' {out}"], capture_output=True, text=True)
    assert words.stdout.splitlines()[:2] == ["docker", "run"]
    assert f"type=bind,src={where},dst=/workspace/llm-train-bench/runs" in words.stdout
    assert words.stdout.splitlines()[-1] == "a b.py"
    assert not (ready.home / ".cache").exists() and not where.exists()


def test_chosen_gpus(ready):
    assert ready.launch("--gpus", "0,1", "true")[0] == 0
    assert values(ready.started(), "--gpus") == ['"device=0,1"']


def test_one_gpu(machine):
    machine.engine()
    machine.nvidia(1)
    assert machine.launch("--gpus", "0", "true")[0] == 0
    code, _, error = machine.launch("--gpus", "1", "true")
    assert code == 2 and "there are 1, numbered from 0" in error


def test_re_entry_runs_in_the_container_that_is_there(ready):
    (ready.state / "container").write_text(f"true|llm-train-bench:nvidia|{ROOT}")
    code, _, error = ready.launch("nvidia-smi", "-L", NNODES="2")
    assert code == 0 and "entering it" in error
    call = ready.started()
    # It runs on the image it was started with; the name may mean another one now.
    assert not any(v.startswith("BENCH_IMAGE") for v in values(call, "-e"))
    assert call[:3] == ["docker", "exec", "-i"] and call[-2:] == ["nvidia-smi", "-L"]
    assert "NNODES" in values(call, "-e")
    assert call[call.index("bash") :][:4] == ["bash", "-c", 'exec "$@"', "bash"]
    assert ready.calls("start") == []
    (ready.state / "calls.jsonl").unlink()
    (ready.state / "container").write_text(f"false|llm-train-bench:nvidia|{ROOT}")
    (ready.state / "no_image").touch()  # it runs, even if its tag is gone
    assert ready.launch("true")[0] == 0
    assert len(ready.calls("start")) == 1 and ready.started()[1] == "exec"


@pytest.mark.parametrize(
    ("argv", "container", "message"),
    [
        (
            ["--gpus", "0"],
            f"true|llm-train-bench:nvidia|{ROOT}",
            "--gpus: container llm-train-bench-",
        ),
        (["--output", "/tmp/x"], f"true|llm-train-bench:nvidia|{ROOT}", "--output: container"),
        (
            ["--image", "other:1"],
            f"true|llm-train-bench:nvidia|{ROOT}",
            "of llm-train-bench:nvidia",
        ),
        ([], "true|llm-train-bench:nvidia|/another/clone", "is of another tree, /another/clone"),
    ],
)
def test_what_a_running_container_cannot_follow_is_refused(argv, container, message, ready):
    (ready.state / "container").write_text(container)
    code, _, error = ready.launch(*argv, "true")
    assert code == 1 and message in error and "--name starts another" in error
    assert error.count("\n") == 1 and not ready.calls("run", "exec")


@pytest.mark.parametrize("name", ["localhost/other:1", "docker.io/library/other:1"])
def test_the_image_that_runs_may_be_named_in_full(name, ready):
    (ready.state / "container").write_text(f"true|{name}|{ROOT}")
    assert ready.launch("--image", "other:1", "true")[0] == 0
    assert ready.launch("true", BENCH_IMAGE="another:1")[0] == 1


def test_paths_of_the_host_stay_there(ready):
    assert (
        ready.launch("true", HIP_PATH="/opt/rocm", TORCH_HOME="/x", HIP_LAUNCH_BLOCKING="1")[0] == 0
    )
    names = values(ready.started(), "-e")
    assert "HIP_LAUNCH_BLOCKING" in names and not {"HIP_PATH", "TORCH_HOME"} & set(names)


def test_the_mounted_trees_revision_is_told(ready):
    assert ready.launch("true")[0] == 0
    git = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    assert f"BENCH_GIT_SHA={head}" in values(ready.started(), "-e")


def test_without_a_home_or_a_name(ready):
    ready.put("id", '#!/bin/sh\n[ "$1" = -un ] && exit 1\nexec /usr/bin/id "$@"\n')
    del ready.environment["HOME"]
    code, _, error = ready.launch("--cache", str(ready.home), "true")
    assert (code, error) == (0, "")
    (name,) = values(ready.started(), "--name")
    assert name == f"llm-train-bench-{os.getuid()}-nvidia"
    assert ready.launch("-h")[0] == 0


def test_a_directory_that_cannot_be_made_is_one_line(ready):
    code, _, error = ready.launch("--output", "/dev/null/runs", "true")
    assert code == 1 and error.count("\n") == 1
    assert error.startswith("launch.sh: /dev/null/runs: cannot be made; --output and --cache")


def test_docker_with_selinux(ready):
    (ready.state / "security").write_text("[name=selinux]")
    assert ready.launch("true")[0] == 0
    assert "label=disable" in values(ready.started(), "--security-opt")


def test_rootless_docker_asks_for_no_more_memory_to_lock_than_there_is(ready):
    (ready.state / "security").write_text("[name=rootless]")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    small = limit if limit != resource.RLIM_INFINITY else 8 << 20
    done = subprocess.run(
        ["bash", "-c", f'ulimit -l {small // 1024}; exec bash "$0" true', str(ROOT / "docker/launch.sh")],
        env=ready.environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert values(ready.started(), "--ulimit") == ["stack=67108864"]


def test_nodes_wait_for_the_first(machine):
    """Each node also knows if it is the one where all meet."""
    machine.put("python", '#!/bin/sh\necho "$@"\n')
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        found = {}
        where = {"NNODES": "2", "HEAD": "127.0.0.1", "PORT": port, "JOB_ID": "k3v"}
        for node in ("0", "1", ""):
            done = subprocess.run(
                ["bash", str(ROOT / "docker/torchrun_node.sh"), "train_fsdp.py", "x.json"],
                env=machine.environment | where | {"NODE": node},
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            found[node] = done.stdout
    assert "--rdzv-conf is_host=1 train_fsdp.py x.json" in found["0"]
    assert "--rdzv-conf is_host=0 train_fsdp.py x.json" in found["1"]
    assert "is_host" not in found[""] and "--rdzv-id k3v" in found[""]
    done = subprocess.run(
        ["bash", str(ROOT / "docker/torchrun_node.sh"), "train_fsdp.py", "x.json"],
        env=machine.environment | where | {"JOB_COMPLETION_INDEX": "1", "WAIT": "2"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == (
        f"torchrun_node.sh: nothing answers at 127.0.0.1:{port} after 2 s; is node 0 up?\n"
    )


def test_podman(machine):
    machine.engine("podman", "podman version 5.4.0")
    machine.nvidia(2)
    code, _, error = machine.launch("true")
    assert code == 1 and "nvidia-ctk cdi generate" in error
    machine.file("/etc/cdi/nvidia.yaml")
    assert machine.launch("--gpus", "1", "true")[0] == 0
    call = machine.started()
    assert call[0] == "podman" and values(call, "--device") == ["nvidia.com/gpu=1"]
    assert "--gpus" not in call and "label=disable" in values(call, "--security-opt")
    assert values(call, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    if os.getuid():
        assert "--userns=keep-id" in call


def test_rootless_docker_keeps_its_own_user(ready):
    """Root inside is the user outside; the image's own user would be a stranger to the mounts."""
    (ready.state / "security").write_text("[name=seccomp name=rootless]")
    assert ready.launch("true")[0] == 0
    assert values(ready.started(), "--user") == ["0:0"]


def test_paths_images_and_visible_devices(ready, tmp_path):
    code, _, error = ready.launch(
        "--output",
        str(tmp_path / "some/where"),
        "--cpu",
        "--image",
        "my:cpu",
        "true",
        CUDA_VISIBLE_DEVICES="1",
    )
    assert code == 0, error
    call = ready.started()
    assert "my:cpu" in call and "CUDA_VISIBLE_DEVICES" in values(call, "-e")
    assert any(
        m.startswith(f"type=bind,src={tmp_path}/some/where,") for m in values(call, "--mount")
    )
    (ready.state / "calls.jsonl").unlink()
    # The container has GPU 1 alone, and calls it 0.
    assert ready.launch("--gpus", "1", "true", CUDA_VISIBLE_DEVICES="1")[0] == 0
    assert "CUDA_VISIBLE_DEVICES" not in values(ready.started(), "-e")


def test_rdma_devices_where_there_are_any(ready):
    assert ready.launch("true")[0] == 0
    assert "/dev/infiniband" not in ready.started()
    ready.file("/dev/infiniband/uverbs0")
    ready.file("/sys/class/infiniband/mlx5_0")
    (ready.state / "calls.jsonl").unlink()
    assert ready.launch("true")[0] == 0
    assert "/dev/infiniband" in values(ready.started(), "--device")
    assert "IPC_LOCK" in values(ready.started(), "--cap-add")


def test_settings_of_the_host_are_handed_on_and_secrets_are_not(ready):
    assert ready.launch("true", NCCL_DEBUG="INFO", NNODES="2", HF_TOKEN="secret", PORT="1")[0] == 0
    given = values(ready.started(), "-e")
    assert {"NCCL_DEBUG", "NNODES", "PORT"} <= set(given)
    assert not any("secret" in word or "HF_TOKEN" in word for word in ready.started())


def test_cpu(machine):
    machine.engine()
    assert machine.launch("--cpu", "true")[0] == 0
    call = machine.started()
    assert "llm-train-bench:cpu" in call and "--gpus" not in call


@pytest.mark.parametrize(
    ("prepare", "argv", "code", "message"),
    [
        (lambda m: None, [], 1, "no docker or podman on PATH; install it"),
        (lambda m: m.engine(), [], 1, "no nvidia-smi: install NVIDIA's driver"),
        (lambda m: (m.engine(), m.nvidia(0)), [], 1, "nvidia-smi lists no GPU"),
        (lambda m: (m.engine(), m.nvidia(1), (m.state / "runtimes").write_text("{}")), [], 1,
         "nvidia-ctk runtime configure"),
        (lambda m: (m.engine(), m.nvidia(1), (m.state / "no_image").write_text("")), [], 1,
         "no image llm-train-bench:nvidia; build it: docker build"),
        (lambda m: (m.engine(), (m.state / "info_error").write_text("Cannot connect")), [], 1,
         "sudo systemctl start docker"),
        (lambda m: (m.engine(), (m.state / "info_error").write_text("permission denied")), [], 1,
         "sudo usermod -aG docker"),
        (lambda m: m.engine(), ["--engine", "podman"], 1, "no podman on PATH"),
        (lambda m: m.engine(), ["--gpus", "two"], 2, "must be all, or numbers"),
        (lambda m: m.engine(), ["--frobnicate"], 2, "no such option"),
        (lambda m: m.engine(), ["--output", "/tmp/a,b"], 2, "a path with a comma cannot be mounted"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_line_with_what_helps(machine, prepare, argv, code, message):
    prepare(machine)
    status, out, error = machine.launch(*argv, "true")
    assert status == code and out == ""
    assert error.count("\n") == 1 and error.startswith("launch.sh: ") and message in error
    assert machine.calls("run", "exec") == []


def test_an_option_without_its_value(machine):
    code, _, error = machine.launch("--image")
    assert code == 2 and error == "launch.sh: --image needs a value; see launch.sh --help\n"


@pytest.mark.parametrize("script", ["launch.sh", "launch_amd.sh"])
def test_help(machine, script):
    code, out, _ = machine.launch("-h", script=script)
    assert (
        code == 0 and "--dry-run" in out and f"docker/{script}" in out and "Build the image" in out
    )


# --- launch_amd.sh ---------------------------------------------------------------------------------


def test_amd_start(machine):
    machine.engine()
    machine.amd(8)
    machine.file("/proc/sys/kernel/numa_balancing", "1\n")
    group = 4711
    if os.getuid() == 0:
        os.chown(machine.root / "dev/kfd", 0, group)
        (machine.root / "dev/kfd").chmod(0o660)
    code, _, error = machine.launch("true", script="launch_amd.sh", NCCL_IB_HCA="mlx5")
    assert code == 0 and "sudo sysctl kernel.numa_balancing=0" in error
    call = machine.started()
    assert values(call, "--device")[:2] == ["/dev/kfd", "/dev/dri"] and "--gpus" not in call
    assert "seccomp=unconfined" in values(call, "--security-opt")
    assert values(call, "--env-file") == [str(ROOT / "docker/amd.env")]
    assert "NCCL_MIN_NCHANNELS=112" in values(call, "-e") and "NCCL_IB_HCA" in values(call, "-e")
    if os.getuid() == 0:
        assert values(call, "--group-add") == [str(group)]


def test_an_amd_gpu_is_not_each_render_node(machine):
    """Eight MI300X outside virtual machines have 64; the driver's topology maps them to GPUs."""
    machine.engine()
    machine.amd(64)
    for node in range(10):  # two CPUs come first
        gpu = node - 2
        simd, minor = (1216, 128 + 8 * gpu) if gpu >= 0 else (0, 0)
        path = f"/sys/class/kfd/kfd/topology/nodes/{node}/properties"
        machine.file(path, f"cpu_cores_count 0\nsimd_count {simd}\ndrm_render_minor {minor}\n")
    assert machine.launch("true", script="launch_amd.sh")[0] == 0
    assert "NCCL_MIN_NCHANNELS=112" in values(machine.started(), "-e")
    (machine.state / "calls.jsonl").unlink()
    assert machine.launch("--gpus", "0,7", "true", script="launch_amd.sh")[0] == 0
    devices = ["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD184"]
    assert values(machine.started(), "--device") == devices
    code, _, error = machine.launch("--gpus", "8", "true", script="launch_amd.sh")
    assert code == 2 and "there are 8, numbered from 0" in error


def test_some_amd_gpus(machine):
    machine.engine()
    machine.amd(4)
    assert machine.launch("--gpus", "1,3", "true", script="launch_amd.sh")[0] == 0
    call = machine.started()
    assert values(call, "--device") == ["/dev/kfd", "/dev/dri/renderD129", "/dev/dri/renderD131"]
    assert "NCCL_MIN_NCHANNELS=112" not in values(call, "-e")


@pytest.mark.parametrize(
    ("prepare", "argv", "message"),
    [
        (lambda m: None, [], "sudo modprobe amdgpu"),
        (lambda m: m.file("/dev/kfd"), [], "no GPU in /dev/dri"),
        (lambda m: m.amd(2), ["--gpus", "2"], "there are 2, numbered from 0"),
    ],
)
def test_amd_missing(machine, prepare, argv, message):
    machine.engine()
    prepare(machine)
    code, _, error = machine.launch(*argv, "true", script="launch_amd.sh")
    assert code != 0 and error.startswith("launch_amd.sh: ") and message in error
    assert machine.calls("run") == []


def test_amd_settings_are_each_explained_and_recorded():
    from llm_train_bench.run.provenance import SETTINGS

    lines = (ROOT / "docker/amd.env").read_text().splitlines()
    named = [line for line in lines if line and not line.startswith("#")]
    assert "DISABLE_ADDMM_HIP_LT=0" in named
    for line in named:
        assert re.fullmatch(r"[A-Z0-9_]+=\S+", line) and line.startswith(SETTINGS), line
        before = lines[lines.index(line) - 1]
        assert before.startswith("#") or before in named, f"{line} has no reason before it"


# --- many machines ---------------------------------------------------------------------------------


def schema(name: str) -> dict:
    return json.loads(gzip.decompress((ROOT / f"tests/schemas/{name}.json.gz").read_bytes()))


def manifests(name: str) -> list[dict]:
    return list(yaml.safe_load_all((ROOT / "docker" / name).read_text()))


SCHEMAS = {
    "Service": "service-v1", "Job": "job-batch-v1", "PyTorchJob": "pytorchjob-kubeflow.org-v1",
}  # fmt: skip


@pytest.mark.parametrize("name", ["kubernetes-job.yaml", "kubernetes-pytorchjob.yaml"])
def test_manifests_are_valid(name):
    for manifest in manifests(name):
        validator = jsonschema.Draft7Validator(schema(SCHEMAS[manifest["kind"]]))
        assert not [e.message for e in validator.iter_errors(manifest)]
        # The schema refuses what is wrong.
        manifest["spec"]["nodes"] = 2
        assert list(validator.iter_errors(manifest))


def test_manifests_agree_with_themselves():
    service, job = manifests("kubernetes-job.yaml")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {e["name"]: e.get("value") for e in container["env"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    nodes = job["spec"]["completions"]
    assert nodes == job["spec"]["parallelism"] == int(environment["NNODES"])
    assert environment["HEAD"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert container["image"].endswith(environment["BENCH_IMAGE_DIGEST"])
    # A pod that saved and stopped on request is no failure.
    ignored = [
        r["onExitCodes"] for r in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in r
    ]
    assert ignored == [
        {"containerName": container["name"], "operator": "In", "values": [PREEMPTED]}
    ]
    (torch_job,) = manifests("kubernetes-pytorchjob.yaml")
    replicas = torch_job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1 and isinstance(
        torch_job["spec"]["nprocPerNode"], str
    )
    for replica in replicas.values():
        assert [c["name"] for c in replica["template"]["spec"]["containers"]] == ["pytorch"]


@pytest.mark.parametrize("kind", ["none", "pyxis", "docker"])
def test_slurm_variants(kind, tmp_path):
    """Each variant, against an srun that records its arguments."""
    fake = tmp_path / "bin"
    fake.mkdir()
    record = tmp_path / "calls.jsonl"
    srun = (
        f"{PYTHON}import json, os, sys\n"
        "keys = ('MASTER_ADDR', 'MASTER_PORT', 'NNODES', 'HEAD', 'PORT')\n"
        f"with open({str(record)!r}, 'a') as f:\n"
        "    f.write(json.dumps([sys.argv[1:], {k: os.environ.get(k) for k in keys}]) + '\\n')\n"
    )
    for name, text in {"scontrol": "#!/bin/sh\necho node7\necho node8\n", "srun": srun}.items():
        (fake / name).write_text(text)
        (fake / name).chmod(0o755)
    environment = {
        "PATH": f"{fake}:{plain_tools()}",
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "1234", "SLURM_JOB_NUM_NODES": "2", "CONTAINER": kind,
    }  # fmt: skip
    script = ["bash", str(ROOT / "docker/slurm.sbatch"), "train_fsdp.py", "configs/a b.json"]
    if kind == "pyxis":
        done = subprocess.run(script, env=environment, capture_output=True, text=True)
        assert done.returncode != 0 and "a .sqsh file" in done.stderr
        environment["IMAGE"] = "/shared/bench.sqsh"
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = [json.loads(line) for line in record.read_text().splitlines()]
    argv, exported = calls[0]
    assert exported["MASTER_ADDR"] == "node7" and exported["MASTER_PORT"] == "29734"
    assert argv[-2:] == ["train_fsdp.py", "configs/a b.json"]
    if kind == "pyxis":
        assert "--container-image=/shared/bench.sqsh" in argv
    if kind == "docker":
        assert (exported["NNODES"], exported["HEAD"], exported["PORT"]) == ("2", "node7", "29734")
        assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} <= set(argv)
        assert "docker/launch.sh" in argv and "docker/torchrun_node.sh" in argv
        assert calls[-1][0][-3:] == ["rm", "-f", "llm-train-bench-1234"]  # no container is left


@pytest.mark.parametrize("kind", ["none", "docker"])
@pytest.mark.parametrize("code", [75, 1])
def test_slurm_queues_a_job_again_that_saved_and_stopped(code, kind, tmp_path):
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\necho node7\n')
    (tmp_path / "srun").write_text(f"#!/bin/sh\nexit {code}\n")
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{plain_tools()}", "SLURM_SUBMIT_DIR": str(ROOT),
                   "SLURM_JOB_NODELIST": "n", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1",
                   "CONTAINER": kind}  # fmt: skip
    script = ["bash", str(ROOT / "docker/slurm.sbatch"), "train_ddp.py", "x.json"]
    assert subprocess.run(script, env=environment, capture_output=True).returncode == code
    assert ("requeue 7" in (tmp_path / "calls").read_text()) == (code == 75)


def test_slurm_refuses_other_engines(tmp_path):
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node7\n")
    (tmp_path / "scontrol").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{plain_tools()}",
                   "SLURM_SUBMIT_DIR": str(ROOT), "CONTAINER": "lxc",
                   "SLURM_JOB_NODELIST": "n", "SLURM_JOB_ID": "1"}  # fmt: skip
    script = ["bash", str(ROOT / "docker/slurm.sbatch"), "train.py"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "must be none, pyxis or docker" in done.stderr


# --- what a run records ----------------------------------------------------------------------------


def test_the_image_is_in_the_result(tmp_path):
    environment = os.environ | {"BENCH_IMAGE_NAME": "bench:1", "BENCH_IMAGE_DIGEST": "sha256:abc"}
    argv = ["configs/gpt2-tiny.json", "--seq-len", "16", "--bsz", "1", "--n-steps", "1", "--warmup-steps",
            "0", "--device", "cpu", "--output-dir", str(tmp_path)]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "train.py", *argv], cwd=ROOT, env=environment, capture_output=True
    )
    assert done.returncode == 0
    (path,) = tmp_path.glob("*/result.json")
    found = json.loads(path.read_text())["environment"]
    assert found["image"] == {"name": "bench:1", "digest": "sha256:abc"}
    assert container_image({}) is None


def test_an_image_without_history_knows_its_revision(tmp_path, monkeypatch):
    monkeypatch.setattr("llm_train_bench.run.provenance.ROOT", tmp_path)
    monkeypatch.setenv("BENCH_GIT_SHA", "1234abcd")
    assert source_revision.__wrapped__() == {"git_sha": "1234abcd", "git_dirty": None}


def test_scripts_are_executable():
    for script in SCRIPTS:
        if script.name not in ("common.sh", "slurm.sbatch"):
            assert os.access(script, os.X_OK), script
    assert shutil.which("bash")
