"""The wheel, installed into a fresh environment, used beside a `model/` of the user."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

from tests.helpers import ROOT, result_of, words

TINY = "--device cpu --amp off --n-steps 2 --warmup-steps 1 --bsz 1 --seq-len 16".split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree, built from a copy: the build leaves files behind."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    skipped = shutil.ignore_patterns("__pycache__", "roofs.json")
    for name in ("llm_train_bench", "model", "configs"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=skipped)
    others = (ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE"))
    for path in (*ROOT.glob("*.py"), *others):
        shutil.copy(path, tree)
    build = "pip wheel -q --no-deps --no-build-isolation --disable-pip-version-check".split()
    subprocess.run([sys.executable, "-m", *build, "-w", out, tree], check=True)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Run the installed command in an empty directory; the dependencies are those of this environment."""
    env, here = tmp_path_factory.mktemp("env"), tmp_path_factory.mktemp("here")
    venv.create(env)
    site = env / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    pip = words(sys.executable, "-m pip --python", env / "bin/python", "install -q --no-deps")
    # A test may have left PYTHONPATH at this tree, which pip would take for an installed package.
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run([*pip, wheel], check=True, env=environ)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    subprocess.run(["git", "init", "-q", env], check=True)
    commit = ["git", "-C", env, "-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "x"]
    subprocess.run([*commit, "--allow-empty"], check=True)
    (here / "model").mkdir()
    (here / "model/__init__.py").write_text("raise ImportError('the model of the user')")

    def command(*parts, code=0):
        called = words(env / "bin/llm-train-bench", *parts)
        done = subprocess.run(called, cwd=here, env=environ, capture_output=True, text=True)
        assert "Traceback" not in done.stderr, done.stderr
        assert code is None or done.returncode == code, done.stderr
        return done

    command.here, command.site, command.python = here, site, env / "bin/python"
    return command


def test_the_wheel_has_every_file_under_one_name(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    tree = {f"llm_train_bench/{p.relative_to(ROOT)}" for kind in ("*.py", "*.json")
            for p in (ROOT / "model").glob(kind)}  # fmt: skip
    for pattern in ("**/*.py", "py.typed", "*/*.html", "*/*.toml", "compare/page.*"):
        tree |= {str(p.relative_to(ROOT)) for p in (ROOT / "llm_train_bench").glob(pattern)}
    for pattern in ("*.json", "sweeps/*.yaml", "workloads/*/*"):
        tree |= {f"llm_train_bench/configs/{p.relative_to(ROOT / 'configs')}"
                 for p in (ROOT / "configs").glob(pattern) if p.name != "roofs.json"}  # fmt: skip
    tree |= {f"llm_train_bench/scripts/{p.name}" for p in ROOT.glob("*.py")}
    assert names == tree


def test_a_run_a_sweep_and_their_comparison_from_an_empty_directory(run):
    run("train-ddp configs/gpt2-tiny.json --nproc 2 --run-name two", TINY)
    result = result_of(run.here / "runs/two")
    assert result["status"] == "ok" and result["device"]["count"] == 2
    assert result["environment"]["git_sha"] is None  # though the user's project has a revision
    flags = "--set device=cpu amp=off bsz=1 seq-len=16 n-steps=2"
    run("sweep --models configs/llama-tiny.json --output-dir swept", flags)
    run("compare runs swept/runs --output-dir compared")
    assert (run.here / "compared/report.html").exists()


def test_the_tools_and_their_help(run):
    shown = run("--help").stdout
    for command in words("train-fsdp train-pp estimate trace check doctor prepare-data"):
        assert f"  {command} " in shown
    done = run("estimate configs/llama-3.1-8b.json --gpu h100 --gpus 8 --json", code=None)
    assert done.returncode in (0, 4) and json.loads(done.stdout)["gpu"] == "H100 SXM"
    for wrong, answer in (
        ("train configs/gpt2-125.json", "did you mean configs/gpt2-125m.json?"),
        ("trains x", "'trains' is not a command"),
        # The package's baselines are not the user's.
        ("compare runs --baseline configs/baselines.json", "No such file"),
    ):
        assert answer in run(wrong, code=2).stderr
    shell = f"{run.python.parent / 'llm-train-bench'} --help | true"
    assert subprocess.run(shell, shell=True, capture_output=True).stderr == b""
    advice = run("doctor --json", code=None).stdout
    assert "'llm-train-bench[te]'" in advice and "-e ." not in advice
