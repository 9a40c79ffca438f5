"""Containers without an engine: linters, launch scripts against a recording docker, manifests, layers."""

import gzip
import importlib.metadata
import itertools
import json
import os
import re
import shlex
import shutil
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
SHELL = [*SCRIPTS, *ROOT.glob("tests/**/*.sh")]
ENGINE = """#!/bin/sh
here='{state}'
printf '%s\\0' "${{0##*/}}" "$@" >> "$here/calls"; echo >> "$here/calls"
shown() {{ cat "$here/$1" 2> /dev/null || echo "$2"; }}
case "$*" in *"/dev/fd/9 "*) cat <&9 > "$here/given" ;; esac
case "$*" in
--version*) echo '{version}' ;;
info*Runtimes*) shown runtimes '{{"nvidia": {{}}}}' ;;
info*SecurityOptions*) shown security '[name=seccomp]' ;;
"image inspect "*)
    for last; do :; done
    if [ -e "$here/no_image" ]; then cat "$here/no_image" >&2; exit 1; fi
    if [ -e "$here/images" ] && ! grep -qxF "$last" "$here/images"; then exit 1; fi
    echo example.com/bench@sha256:abc ;;
"container inspect "*) cat "$here/container" 2> /dev/null || {{ echo; exit 1; }} ;;
esac
"""
SRUN = """#!/bin/sh
printf '%s\\0' srun "$@" >> '{state}/calls'; echo >> '{state}/calls'
[ -e '{state}/environment' ] || env > '{state}/environment'
exit {code}
"""
# What the scripts may call. The simulated machine has no engine, driver or launcher but those of a test.
TOOLS = """bash cat cut dirname env git grep id ip mkdir od printenv realpath sed sh sha256sum sleep
sort stat touch tr""".split()


class Machine:
    """A simulated machine: an engine that records, GPUs, a root for /dev, /sys and /proc."""

    def __init__(self, tmp_path: Path):
        self.path = tmp_path / "bin"
        self.state, self.root, self.home = (tmp_path / n for n in ("state", "root", "home"))
        for directory in (self.path, self.state, self.root, self.home):
            directory.mkdir()
        for tool in TOOLS:
            (self.path / tool).symlink_to(shutil.which(tool) or "/nowhere")
        self.environment = {"PATH": str(self.path), "HOME": str(self.home), "USER": "someone"}
        self.environment["BENCH_TEST_ROOT"] = str(self.root)

    def put(self, name: str, text: str) -> None:
        file = self.path / name
        file.unlink(missing_ok=True)
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def engine(self, name: str = "docker", version: str = "Docker version 28.2.2") -> None:
        self.put(name, ENGINE.format(state=self.state, version=version))

    def podman(self, cdi: bool = False) -> None:
        (self.path / "docker").unlink(missing_ok=True)
        self.engine("podman", "podman version 5.4.0")
        self.nvidia()
        if cdi:
            self.file("/etc/cdi/nvidia.yaml")

    def slurm(self, kind: str, code: int = 0, preempted: str = "None") -> None:
        """A job of two nodes; srun and scontrol record."""
        answer = f'#!/bin/sh\necho "$@" >> "{self.state}/scontrol"\n'
        answer += f'[ "$1 $2" = "show job" ] && echo "   PreemptTime={preempted}" && exit\n'
        self.put("scontrol", f"{answer}echo node7\necho node8\n")
        self.put("srun", SRUN.format(state=self.state, code=code))
        job = dict(SUBMIT_DIR=str(ROOT), JOB_NODELIST="node[7-8]", JOB_ID="1234", JOB_NUM_NODES="2")
        self.environment |= {f"SLURM_{k}": v for k, v in job.items()} | {"CONTAINER": kind}

    def nvidia(self) -> None:
        self.put("nvidia-smi", '#!/bin/sh\nprintf "GPU 0: NVIDIA H200\\nGPU 1: NVIDIA H200\\n"\n')

    def file(self, path: str, text: str = "") -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def amd(self) -> None:
        for name in ("kfd", "dri/renderD128", "dri/renderD129"):
            self.file(f"/dev/{name}")

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
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def ready(machine):
    """Docker, its toolkit and two NVIDIA GPUs."""
    machine.engine()
    machine.nvidia()
    return machine


def values(call: list[str], flag: str) -> list[str]:
    return [b for a, b in itertools.pairwise(call) if a == flag]


@pytest.mark.parametrize("linter", [["hadolint", *DOCKERFILES], ["shellcheck", "-x", *SHELL]])
def test_linters_find_nothing(linter):
    command = [BIN / linter[0], *linter[1:]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


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
INSTALL = r"install\.sh /opt/bench/pyproject\.toml (.*)"


def put(site, name, version):
    """Install a package without code, as an image's makers did."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(DESCRIBED.format(name, version))


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
    command = words("bash docker/install.sh pyproject.toml", *extras)
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert (done.returncode != 0) is fails, done.stderr
    return done.stderr


def installed(image) -> set[str]:
    packages = importlib.metadata.distributions(path=[str(image)])
    return {f"{package.metadata['Name']}=={package.version}" for package in packages}


def test_dependency_layer_leaves_the_images_own_alone(image):
    before = installed(image)
    extras = {x for path in DOCKERFILES for x in re.search(INSTALL, path.read_text())[1].split()}
    assert {"energy", "fp8"} <= extras  # of any image: the union installs, so each image's do
    assert install(image, *sorted(extras)) == "" and before < installed(image)
    names = {package.partition("==")[0] for package in installed(image)}
    assert {"PyYAML", "pydantic", "tensorboard", "torchao", "nvidia-ml-py"} <= names


OLD, LEFT = "torchao==0.14.0+git1", "install.sh: left out torchao>=0.18: "
THEIRS = importlib.metadata.version("protobuf")
TOO_OLD = "install.sh: the image contradicts what the project needs: choose a newer BASE_IMAGE\n"


@pytest.mark.parametrize(
    ("has", "pins", "said", "stays"),
    [(OLD, f"{OLD}  # built here\n", f"{LEFT}{OLD}\n", True),
     (OLD, "", f"{LEFT}{OLD}\n", True),
     ("torchao==0.14.0", "# none\n-i x\ntorchao==0.14.0\n", f"{LEFT}torchao==0.14.0\n", False),
     ("torchao==0.15.0+gite9c7bead9", "", "", True),  # AMD's
     # What is installed wins over a pin; pip alone would go back from the first to the second.
     (f"protobuf=={THEIRS}.post1", f"protobuf=={THEIRS}\n", "", True),
     ("pydantic==1.10.0", "", TOO_OLD, None), ("torch==2.10.0+rocm7", "", TOO_OLD, None)],
)  # fmt: skip
def test_what_the_image_has_stays(has, pins, said, stays, image, tmp_path):
    """What contradicts it is left out; the build fails where the project itself needs another version."""
    (tmp_path / "constraint.txt").write_text(pins)
    name, version = has.split("==")
    if stays is not False:  # else it is only pinned
        for other in image.glob(f"{name}-*"):
            shutil.rmtree(other)
        put(image, name, version)
    before = installed(image)
    constraint = {"PIP_CONSTRAINT": str(tmp_path / "constraint.txt")}
    assert install(image, "fp8", "energy", fails=stays is None, **constraint).endswith(said)
    assert before <= installed(image) and (has in installed(image)) is (stays is not False)
    assert (before == installed(image)) is (stays is None)


def test_build_fails_where_something_of_the_image_was_replaced(image):
    """Even if pip let it through: the versions before and after are compared."""
    metadata = image / "transformer_engine-2.19.0+abc.dist-info/METADATA"
    wrapper = image.parents[3] / "python"
    wrapper.write_text(
        f'#!/bin/sh\n[ "$3" != install ] || exec sed -i s/2.19.0+abc/9.9/ "{metadata}"\n'
        f'exec "{image.parents[2]}/bin/python" "$@"\n'
    )
    wrapper.chmod(0o755)
    error = install(image, fails=True, PYTHON=str(wrapper))
    message = "pip replaced what belongs to the image: transformer_engine==2.19.0+abc"
    assert error == f"install.sh: {message}\n"


# --- launch.sh -------------------------------------------------------------------------------------


def test_a_first_start(ready):
    command = ["python", "train.py", "configs/a b.json", "--bsz", "2"]
    call = ready.starts(command)
    assert call[:2] == ["docker", "run"]
    assert {"--rm", "--init", "--pull=never", "--ipc=host"} <= set(call)
    assert values(call, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    head = provenance.source_revision()["git_sha"] or ""  # of the mounted tree
    assert f"BENCH_GIT_SHA={head}" in values(call, "-e")
    cache = ready.home / ".cache/llm-train-bench/llm-train-bench_nvidia"
    assert f"type=bind,src={cache},dst=/cache" in values(call, "--mount")
    assert (cache / "home").is_dir()
    # The command, its spaces kept, comes last.
    image = call.index("llm-train-bench:nvidia")
    assert call[image + 1 :] == ["bash", "-c", 'exec "$@"', "bash", *command]
    # Without a command it is a shell; there is no terminal here.
    call = ready.starts()
    assert call[-1] == "bash" and "-t" not in call


SITUATIONS = {
    "": lambda m: None,
    "no engine": lambda m: (m.path / "docker").unlink(),
    "no toolkit": lambda m: (m.nvidia(), (m.state / "runtimes").write_text("{}")),
    "no image": lambda m: (m.state / "no_image").write_text("\nNo such image: x\n"),
    "no daemon": lambda m: (m.state / "no_image").write_text("Cannot connect\n"),
    "older image": lambda m: (m.state / "images").write_text("llm-train-bench\n"),
    "rootless": lambda m: (m.state / "security").write_text("[name=seccomp name=rootless]"),
    "podman": lambda m: m.podman(),
    "podman's GPUs": lambda m: m.podman(cdi=True),
    "RDMA": lambda m: m.file("/dev/infiniband/uverbs0"),
    "a job": lambda m: m.slurm("lxc"),
}
LINES = (ROOT / "tests/launches.txt").read_text().format(root=ROOT, work=WORK).splitlines()
ROWS = [[part.strip() for part in line.split("|")] for line in LINES if line[0] != "#"]
STARTS, REFUSALS = ([row for row in ROWS if len(row) == n] for n in (4, 5))
HOST = dict(HIP_PATH="/opt/rocm", TORCH_HOME="/x", HF_TOKEN="secret", HIP_LAUNCH_BLOCKING="1",
            NCCL_DEBUG="INFO", NNODES="2", PORT="1", CUDA_VISIBLE_DEVICES="1", FI_PROVIDER="efa",
            UCX_TLS="tcp", CUDA_DEVICE_MAX_CONNECTIONS="1", WANDB_API_KEY="secret", HF_HOME="/x",
            HF_HUB_CACHE="/x", NCCL_CONF_FILE="/x", MINE="1", NCCL_TOPO_FILE="/topology",
            LLM_TRAIN_BENCH_HARDWARE="/more.json")  # fmt: skip


@pytest.mark.parametrize("situation, argv, flag, there", STARTS)
def test_what_a_container_is_started_with(situation, argv, flag, there, ready):
    SITUATIONS[situation](ready)
    arguments = values(ready.starts(argv, "true", **HOST), flag)
    for word in there.split():
        assert (word.lstrip("!") in arguments) == (word[0] != "!"), word


@pytest.mark.parametrize("situation, script, text, code, message", REFUSALS)
def test_what_is_missing_is_one_line(situation, script, text, code, message, machine):
    machine.engine()
    SITUATIONS[situation](machine)
    argv = text.replace("+", "\n").split(" ") if text else []
    argv += ["true"] * (argv != ["--image"])
    machine.refuses(int(code), message, argv, script=script)
    assert machine.launch(argv, script=script)[2].startswith(f"{script}: ")


def test_no_value_of_a_variable_is_shown(ready):
    """They may be keys: not in a dry run, nor in the engine's command line, nor in a result."""
    secrets = {"B_KEY": "sesame", "WANDB_API_KEY": "sesame"}
    code, out, error = ready.launch("--dry-run --env B_KEY true", **secrets)
    assert code == 0 and "B_KEY" in out and "WANDB_API_KEY" in out and "sesame" not in out + error
    assert "sesame" not in str(ready.starts("--env B_KEY true", **secrets))
    named = {"NCCL_AUTH_KEY": "sesame", "FI_TOKEN": "sesame", "HF_TOKEN": "sesame"} | secrets
    with mock.patch.dict(os.environ, named):
        assert "sesame" not in str(provenance.describe_environment(torch.device("cpu")))


def test_variables_of_the_user_have_any_name_and_come_last(ready, tmp_path):
    """Also names of variables of the launcher, which goes its way."""
    mine = {"name": "/etc", "repo": "/etc", "args": "/etc", "HF_HOME": "/mine"}
    file = tmp_path / "env"
    file.write_text("A=1")
    argv = words(*(f"--env {name}" for name in mine), "--env-file", file, "true")
    call = ready.starts(argv, **mine)
    assert values(call, "--env-file") == [str(file)] and "llm-train-bench:nvidia" in call
    assert values(call, "-e")[-4:] == list(mine)
    assert f"type=bind,src={ROOT},dst={WORK}" in values(call, "--mount")


INJECTIONS = [line.rstrip("\n").replace("+", "\n").split(" ", 2) for line in
              (ROOT / "tests/injections.txt").open() if line[0].isdigit()]  # fmt: skip
HARMLESS = {"--env": "HOME"}


@pytest.mark.parametrize("code, option, value", INJECTIONS)
@pytest.mark.parametrize("script", [NVIDIA, AMD])
def test_a_value_cannot_say_more_than_its_option(script, code, option, value, ready, tmp_path):
    """It is refused, or the engine's line differs from that of a harmless value in its own words only."""
    ready.amd()
    value = value.replace("TMP", str(tmp_path))
    more = words("--env HOME true")
    status, _, error = ready.launch([option, value, *more], script=script)
    assert (status, (tmp_path / "ran").exists()) == (int(code), False) and "secret" not in error
    calls = ready.calls("run")
    assert len(calls) == (status == 0)
    for call in calls:
        calm = ready.starts([option, HARMLESS.get(option, "/tmp"), *more], script=script)
        changed = [one for one, other in zip(calm, call, strict=True) if one != other]
        assert len(changed) <= (3 if option == "--image" else 1), changed  # its cache and its name


@pytest.mark.parametrize("script", [NVIDIA, AMD])
def test_a_dry_run_needs_no_engine_no_gpu_and_no_image(machine, script, tmp_path):
    """It says what is not here, prints the line all the same, and makes nothing; else it fails."""
    where, command = tmp_path / "some where", ["python", "a b.py"]
    argv = words("--dry-run --gpus 0,1 --output", where, command)
    code, out, error = machine.launch(argv, script=script)
    line = shlex.split(out)
    assert code == 0 and line[:2] == ["docker", "run"] and line[-2:] == command
    assert f"type=bind,src={where},dst={WORK}/runs" in line
    assert not (machine.home / ".cache").exists() and not where.exists()
    help_text = machine.launch("-h", script=script)[1]
    assert all(t in help_text for t in ("--dry-run", f"docker/{script}", "Build the image"))
    assert error.count("not here: ") >= 3 and "no docker on PATH" in error
    assert machine.launch("ls", script=script)[0] == 1
    machine.podman()
    assert machine.launch("--dry-run ls", script=script)[1].startswith("podman run ")


def test_re_entry_runs_in_the_container_that_is_there(ready):
    (ready.state / "container").write_text(f"llm-train-bench:nvidia|{ROOT}\n")
    (ready.state / "no_image").touch()  # it runs, even if its tag is gone
    call = ready.starts("--env A_B nvidia-smi -L", NNODES="2", A_B="1")
    assert "entering container" in ready.error and "of image llm-train-bench:nvidia" in ready.error
    # It runs on the image it was started with; the name may mean another one now.
    assert not any(v.startswith("BENCH_IMAGE") for v in values(call, "-e"))
    assert call[:3] == ["docker", "exec", "-i"] and call[-2:] == ["nvidia-smi", "-L"]
    assert {"NNODES", "A_B"} <= {*values(call, "-e")}
    assert call[call.index("bash") :][:4] == ["bash", "-c", 'exec "$@"', "bash"]
    for argv in ("--gpus 0", "--output /tmp/x", "--mount /etc", "--image other:1"):
        message = f"{argv.split()[0]}: container llm-train-bench-"
        ready.refuses(1, message, argv, "true")
        ready.refuses(1, "--name starts another", argv, "true")
    (ready.state / "container").write_text("llm-train-bench:nvidia|/another/clone\n")
    ready.refuses(1, "is of another tree, /another/clone; --name starts another", "true")


def test_without_a_home_or_a_name_and_with_little_memory_to_lock(ready):
    ready.put("id", '#!/bin/sh\n[ "$1" = -un ] && exit 1\nexec /usr/bin/id "$@"\n')
    del ready.environment["HOME"]
    SITUATIONS["rootless"](ready)  # asks for no more than there is
    little = "ulimit() { echo 64; }; export -f ulimit"
    call = ready.starts("--cache", ready.home, "true", before=little)
    assert values(call, "--ulimit") == ["stack=67108864"]
    assert values(call, "--name") == [f"llm-train-bench-{os.getuid()}-nvidia"]
    assert ready.error == "" and ready.launch("-h")[0] == 0


def test_nodes_wait_for_the_first(machine):
    """Each node also knows if it is the one where all meet. torchrun's options may stand first."""
    machine.put("python", '#!/bin/sh\necho "$@"\n')
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        where = {"NNODES": "2", "HEAD": "127.0.0.1", "PORT": port, "JOB_ID": "k3v"}
        where |= {"script": "torchrun_node.sh"}
        for node, is_host in (("0", 1), ("1", 0), ("", None)):
            conf = f"--rdzv-conf is_host={is_host} " if node else ""
            argv = "--numa-binding node train_fsdp.py x.json"
            code, out, _ = machine.launch(argv, NODE=node, **where)
            assert code == 0 and f":{port} {conf}{argv}" in out and "--rdzv-id k3v" in out
    where |= {"JOB_COMPLETION_INDEX": "1", "WAIT": "2"}
    code, _, error = machine.launch("train_fsdp.py x.json", **where)
    message = f"nothing answers at 127.0.0.1:{port} after 2 s; is node 0 up?"
    assert (code, error) == (1, f"torchrun_node.sh: {message}\n")


def test_amd_start(machine):
    machine.engine()
    machine.amd()
    place = "/sys/class/kfd/kfd/topology/nodes/{}/properties".format
    for node in range(10):  # two CPUs come first
        machine.file(place(node), f"gfx_target_version {90402 if node > 1 else 0}\n")
    machine.file("/proc/sys/kernel/numa_balancing", "1\n")
    if os.getuid() == 0:
        os.chown(machine.root / "dev/kfd", 0, 4711)
    call = machine.starts("true", script=AMD, NCCL_IB_HCA="mlx5")
    assert "sudo sysctl kernel.numa_balancing=0" in machine.error
    assert values(call, "--device") == ["/dev/kfd", "/dev/dri"] and "--gpus" not in call
    assert "seccomp=unconfined" in values(call, "--security-opt")
    assert values(call, "--env-file") == [str(ROOT / "docker/amd.env")]
    assert {"NCCL_MIN_NCHANNELS=112", "NCCL_IB_HCA"} <= set(values(call, "-e"))
    assert "4711" in values(call, "--group-add") or os.getuid() != 0
    call = machine.starts("--gpus 0,7 true", script=AMD, HIP_VISIBLE_DEVICES="1")
    assert "ROCR_VISIBLE_DEVICES=0,7" in values(call, "-e")
    assert not {"NCCL_MIN_NCHANNELS=112", "HIP_VISIBLE_DEVICES"} & set(values(call, "-e"))
    machine.file(place(9), "gfx_target_version 90500\n")  # MI350: advice for MI300X is not for it
    assert "NCCL_MIN_NCHANNELS=112" not in values(machine.starts("true", script=AMD), "-e")


# --- many machines ---------------------------------------------------------------------------------


def test_the_manifest_is_valid_and_agrees_with_itself():
    """Where the pods meet, how many there are, and that a run which saved and stopped is no failure."""
    manifest = yaml.safe_load((ROOT / "docker/kubernetes-jobset.yaml").read_text())
    schema = (ROOT / "tests/schemas/jobset-jobset.x-k8s.io-v1alpha2.json.gz").read_bytes()
    validator = jsonschema.Draft7Validator(json.loads(gzip.decompress(schema)))
    assert not [e.message for e in validator.iter_errors(manifest)]
    assert list(validator.iter_errors(manifest | {"spec": {"nodes": 2}}))
    (rule,) = manifest["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    (node,), name = manifest["spec"]["replicatedJobs"], manifest["metadata"]["name"]
    job = node["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    codes = [r["onExitCodes"] for r in job["podFailurePolicy"]["rules"] if "onExitCodes" in r]
    assert codes == [{"containerName": container["name"], "operator": "In", "values": [PREEMPTED]}]
    assert {"/dev/shm", f"{WORK}/runs"} == {m["mountPath"] for m in container["volumeMounts"]}
    environment = {e["name"]: e.get("value") for e in container["env"]}
    assert environment["HEAD"] == f"{name}-{node['name']}-0-0.{name}"
    assert job["completions"] == job["parallelism"] == int(environment["NNODES"])
    assert container["image"].endswith(environment["BENCH_IMAGE_DIGEST"])


@pytest.mark.parametrize("kind", ["none", "pyxis", "docker"])
def test_slurm_variants(kind, machine):
    machine.slurm(kind)
    command = ["train_fsdp.py", "configs/a b.json"]
    code, _, error = machine.launch(command, script="slurm.sbatch", IMAGE="/shared/bench.sqsh")
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


@pytest.mark.parametrize("code, preempted, again", [
    (75, "None", True), (143, "2026-11-26T18:00:00", True), (1, "None", False), (143, "None", False),
])  # fmt: skip
def test_slurm_queues_a_job_again_that_saved_or_was_preempted(code, preempted, again, machine):
    for kind in ("none", "docker"):
        machine.slurm(kind, code, preempted)
        assert machine.launch("train_ddp.py x.json", script="slurm.sbatch")[0] == code
        assert ("requeue 1234" in (machine.state / "scontrol").read_text()) is again


@mock.patch.dict(
    os.environ, BENCH_IMAGE_NAME="x:1", BENCH_IMAGE_DIGEST="y", BENCH_GIT_SHA="1234abcd"
)
def test_the_image_is_in_the_result_and_knows_its_revision_without_history(tmp_path, monkeypatch):
    image = provenance.describe_environment(torch.device("cpu"))["image"]
    assert image == {"name": "x:1", "digest": "y"}
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.source_revision.__wrapped__() == {"git_sha": "1234abcd", "git_dirty": None}
