"""For all tests: the same machine, environment, directory and order for everyone.

The first part runs before torch is imported, which reads the environment.
"""

import atexit
import gc
import json
import os
import runpy
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

# Settings of the environment that change what a run does. A stranger may have any of them.
CLEARED = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_", "SLURM_", "OMPI_",
    "PMI_", "MPI_", "TORCHELASTIC_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "KINETO_",
    "NCCL_", "GLOO_", "OMP_", "MKL_", "BENCH_", "LLM_TRAIN_BENCH_PARENT", "LINES", "NO_COLOR",
    "FORCE_COLOR", "CLICOLOR", "TTY_", "PYTHONWARNINGS", "XDG_CACHE_HOME", "MPLCONFIGDIR", "HF_",
    "XDG_CONFIG_HOME", "LLM_TRAIN_BENCH_HARDWARE", "PYTHONDONTWRITEBYTECODE",
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "PIP_USER", "PIP_TARGET", "PIP_REQUIRE_VIRTUALENV",
)  # fmt: skip
ROOT = Path(__file__).parents[1]
HOME = "LLM_TRAIN_BENCH_TEST_HOME"
THREADS = os.environ.get("OMP_NUM_THREADS", "1")


def invent_a_machine() -> None:
    """This process, and all that it starts, see the machine of tests/invented, and an empty home."""
    invented = Path(__file__).parent / "invented"
    runpy.run_path(str(invented / "sitecustomize.py"))
    for name in [n for n in os.environ if n.startswith(CLEARED)]:
        del os.environ[name]
    os.environ |= {"OMP_NUM_THREADS": THREADS, "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "100"}
    os.environ |= {"PYTHONUTF8": "1"}
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(invented), before)))
    if HOME not in os.environ:  # pytest's workers inherit it
        os.environ[HOME] = tempfile.mkdtemp(prefix="llm-train-bench-home-")
        atexit.register(shutil.rmtree, os.environ[HOME], ignore_errors=True)
    os.environ["HOME"] = os.environ[HOME]
    # "nohup make test &" ignores signals, and every process that a test starts would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for ignored in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(ignored) is signal.SIG_IGN:
            signal.signal(ignored, signal.SIG_DFL)
    os.umask(0o022)
    os.chdir(ROOT)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """tests/benchmarks measures on request only; its plugin is not in every image."""
    if hasattr(config.option, "benchmark_disable") and not config.option.benchmark_enable:
        config.option.benchmark_disable = True
    if not any("test_gpu" in str(arg) for arg in config.args) and config.option.markexpr != "gpu":
        invent_a_machine()


def pytest_collection_modifyitems(items):
    """The files that take longest first; those that compute beside those that wait."""
    longest = ("layouts", "launch", "distributed", "chains", "combinations", "meter", "estimate",
               "check", "train", "profile", "sweep", "precision", "containers")  # fmt: skip
    ranks = {f"test_{name}.py": i for i, name in enumerate(longest)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect():
    """A run collects garbage before it measures; pytest's own objects make that slow, so freeze them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def as_it_was():
    """A test that changes the directory or signals' handlers leaves them as they were for the next."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    numbers += (signal.SIGUSR1, signal.SIGUSR2)
    before, handlers = Path.cwd(), {n: signal.getsignal(n) for n in numbers}
    yield
    os.chdir(before)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def output_of(capsys):
    """Runs a tool in this process, with words(...) as arguments; what it printed."""
    from tests.helpers import words

    def run(main, *parts, code=0) -> str:
        capsys.readouterr()
        assert main(words(*parts)) == code
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    """Runs a tool that must end with 2 and one line that holds the message; that line."""
    from tests.helpers import words

    def run(main, message, *parts) -> str:
        capsys.readouterr()
        assert main(words(*parts)) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
        return error

    return run


@pytest.fixture
def own_hardware(monkeypatch, tmp_path):
    """Writes the user's own hardware.json, with these devices; its path."""
    from llm_train_bench.base.hardware import devices

    def write(*entries) -> Path:
        path = tmp_path / "hardware.json"
        path.write_text(json.dumps({"devices": entries}))
        monkeypatch.setenv("LLM_TRAIN_BENCH_HARDWARE", str(path))
        devices.cache_clear()
        return path

    yield write
    devices.cache_clear()
