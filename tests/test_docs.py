"""The registry defines exactly the fields there are; the pages' tables, commands and names are real."""

import dataclasses
import importlib
import json
import re
import shlex
import tomllib

import pytest
from pydantic import BaseModel

import compare
import prepare_data
from docs.tables import with_tables
from llm_train_bench.base.hardware import find_hardware
from llm_train_bench.base.strict import Strict
from llm_train_bench.formulas.memory_model import estimate_memory
from llm_train_bench.results import schema
from llm_train_bench.results.metrics import FIELDS
from llm_train_bench.results.result_files import Step
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import Script
from llm_train_bench.settings.plan import make_plan
from tests.helpers import ROOT, result_of, words

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_tables_are_what_the_code_declares(path):
    """`make docs` writes them."""
    page = path.read_text(encoding="utf-8")
    assert with_tables(page) == page


def test_the_registry_defines_each_field_once_and_the_page_shows_all():
    models = [v for v in vars(schema).values() if isinstance(v, type) and issubclass(v, BaseModel)]
    fields = {m.__name__: list(m.model_fields) for m in models if m not in (Strict, BaseModel)}
    fields["Step"] = [field.name for field in dataclasses.fields(Step)]
    rows = {name: list(section) for name, section in FIELDS.items() if name != "console"}
    assert {k: sorted(v) for k, v in rows.items()} == {k: sorted(v) for k, v in fields.items()}
    page = (ROOT / "docs/METRICS.md").read_text(encoding="utf-8")
    assert re.findall(r"^- `(\w+)`", page, re.MULTILINE).count("step_time_mean_s") == 2
    assert all(f"- `{name}`" in page for names in rows.values() for name in names)


def test_the_index_lists_every_page():
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert page.stem == "README" or f"]({page.name}" in index, page.name


TASKS = (ROOT / "docs/TASKS.md").read_text(encoding="utf-8")


def commands(pages: str = README) -> list[str]:
    """Lines of shell blocks that run something of ours, each once."""
    blocks = re.findall(r"```bash\n(.*?)```", pages, flags=re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return list(dict.fromkeys(line.split("#")[0].strip() for line in lines if line.strip()))


MIGRATING = (ROOT / "docs/MIGRATING.md").read_text(encoding="utf-8")


def replacements() -> list[str]:
    """Our commands in the right columns of MIGRATING.md."""
    ours = []
    for line in MIGRATING.splitlines():
        cells = line.replace("\\|", "\0").split("|")[1:-1]
        cells = [cell.replace("\0", "|").strip() for cell in cells]
        if len(cells) == 2 and cells[0].startswith("`") and " " in cells[0]:
            ours += re.findall(r"`((?:python|torchrun|nsys) [^`]+)`", cells[1])
    assert len(ours) >= 15
    return [c for c in dict.fromkeys(ours) if c not in commands(README + TASKS)]


def test_readme_is_short_and_has_commands():
    assert len(README.split()) <= 900
    assert sum(c.startswith("python ") for c in commands()) >= 4
    assert "make demo" in commands() and "`make test`" in README


@pytest.mark.parametrize("command", [*commands(README + TASKS), *replacements()])
def test_command_runs(command, monkeypatch, run_documented):
    """Tools run. What trains is planned below, for the machine that it needs; every combination of
    toggles is trained in tests/test_combinations.py."""
    words = shlex.split(command)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("="))
    if words[0] == "sbatch":
        script = words.index("docker/slurm.sbatch") + 1
        assert (ROOT / words[script]).exists() and (ROOT / words[script + 1]).exists()
        parse_args(words[script + 1 :], words[script])
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.M)
    elif words[0] == "docker":  # tests/test_containers.py looks at images and launch scripts
        assert (ROOT / words[words.index("-f") + 1]).exists()
    elif words[0] == "pip":
        extras = words[-1].removeprefix(".[").removesuffix("]").split(",")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert set(extras) <= set(project["optional-dependencies"])
    elif words[0] == ".":
        assert words[1] == ".venv/bin/activate"  # what `make` makes
    elif words[0].startswith("docker/"):  # the README has the same commands without a container
        assert (ROOT / words[0]).exists() and shlex.join(words[1:]) in commands()
    else:  # where pages start a script by torchrun or nsys, its own words count
        assert words[0] in ("python", "torchrun", "nsys")
        script = next(i for i, word in enumerate(words) if word.endswith(".py"))
        assert (ROOT / words[script]).exists(), command
        if words[script:] != ["sweep.py", "--help"]:  # tests/test_command_line.py asks all for help
            run_documented(words[script], words[script + 1 :])


TOOLS = ("trace_report.py", "estimate.py", "sweep.py", "compare.py", "doctor.py")


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """A directory with three runs of a quiet machine, for the commands that look at runs."""
    out = tmp_path_factory.mktemp("runs")
    content = result_of(ROOT / "tests/sample/plain")
    for name, seconds in (("a", 0.01), ("b", 0.01002), ("c", 0.00998)):
        rate = content["batch"]["tokens_per_step"] / seconds
        content["metrics"] |= dict(tokens_per_sec=rate, tokens_per_sec_per_gpu=rate,
            step_time_ci95_low_s=0.999 * seconds, step_time_ci95_high_s=1.001 * seconds)  # fmt: skip
        times = [seconds, 1.01 * seconds, 0.99 * seconds] * 13
        content |= {"run_name": name, "step_times_s": times}
        (out / name).mkdir()
        (out / name / "result.json").write_text(json.dumps(content))
    assert compare.main(words(out, "--save", out / "baselines.json")) == 0
    return out


@pytest.fixture
def run_documented(tmp_path, a_run):
    """Runs a documented command of a tool for real, on small files; reads one that trains."""

    def run(script: str, argv: list[str]) -> None:
        if script == "prepare_data.py":
            text = tmp_path / "some.txt"
            text.write_text("a line of text\n" * 400)
            argv = [str(tmp_path / "out") if a.startswith("data/") else a for a in argv]
            argv = [str(text) if re.match(r"[^-].*(\.txt|/)$", a) else a for a in argv]
            assert prepare_data.main(argv) == 0
        elif script == "check.py":  # tests/test_check.py runs it, with one workload
            assert not argv
        elif script in TOOLS:
            small = ["--dry-run"] if script == "sweep.py" and "--dry-run" not in argv else []
            places = {"comparison": tmp_path / "comparison", "verdict": tmp_path / "verdict"}
            if script == "compare.py":
                places["baselines.json"] = a_run / "baselines.json"
                argv = [str(a_run) if a.startswith(("runs/", "sweeps/")) else a for a in argv]
            argv = [str(places.get(a, a)) for a in argv]
            assert importlib.import_module(script.removesuffix(".py")).main([*argv, *small]) == 0
        else:
            parse_args(argv, script)

    return run


FOLDERS = "llm_train_bench|benchmarks|model|configs|docker|tests|docs"


def test_files_and_targets_that_pages_name_are_there():
    """Links, paths and make targets of the README, CONTRIBUTING and docs/; each table has its head."""
    targets = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = " ".join(targets).split()
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]:
        text = page.read_text(encoding="utf-8")
        headless = re.search(r"(?:^|\n)(?!\|).*\n(\|.*)\n(?!\| ?-)", text)
        assert not headless, f"{page.name}: a table that is cut in two: {headless[1]}"
        links = {m.split("#")[0] for m in re.findall(r"\]\(([^)]+)\)", text)}
        for link in links - {""}:
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"
        assert set(re.findall(r"`make ([\w-]+)", text)) <= set(targets), page.name
        for name in re.findall(rf"`((?:{FOLDERS})/[\w./-]+)`", text):
            made = name == "configs/roofs.json"  # by benchmarks/gemm.py
            assert made or (ROOT / name).exists(), f"{page.name}: {name}"


PER_NODE = {"train.py": 1, "train_ddp.py": 8, "train_fsdp.py": 8, "train_pp.py": 8}
# llama-3.1-70b-proxy is a file of the earlier tool.
START = r"(train\w*\.py) ((?:configs/(?!llama-3.1-70b-p)[\w.-]+\.json|--model-size)[^`#|\n]*)"
COUNTS = {"one": 1, "two": 2, "four": 4, "eight": 8}


def commands_on_gpus() -> list[tuple[str, str, int, str, str, str]]:
    """Page, GPU, how many, script, flags and the text after each command with a model, in all pages.

    The GPU is an H100 with 80 GB, in a node of eight for several ranks, unless the line says otherwise.
    """
    commands = []
    for path in [ROOT / "README.md", *PAGES]:
        for line in path.read_text(encoding="utf-8").splitlines():
            for match in re.finditer(START, line):
                script, flags = match.groups()
                after = line[match.end() :].split("| `")[0]
                ranks = re.search(r"nproc-per-node (\d+)", line)
                ranks = ranks or re.search(r"--nproc (\d+)", flags)
                count = int(ranks[1]) if ranks else PER_NODE[script]
                if of := re.search(r"on each of (\w+)", after):
                    count = COUNTS[of[1]]
                gpu = "h200" if "fits an H200" in line and "--bsz 32" in flags else "h100"
                commands.append((path.name, gpu, count, script, flags.strip(), after))
    return commands


@pytest.mark.parametrize("command", commands_on_gpus(), ids=lambda c: f"{c[0]}: {c[3]} {c[4][:60]}")
def test_documented_command_fits_the_machine_it_is_for(command):
    _, gpu, count, script, flags, after = command
    args = parse_args(shlex.split(flags), script)
    has = find_hardware(gpu).memory_gib
    work = make_plan(args, Script(script), count, "nvidia", memory_gib=has).work
    need = estimate_memory(work).on_device(count) / 2**30
    assert need <= has, f"needs {need:.1f} GiB on {count} x {gpu}"
    # The figure beside it, where the text after the command begins with one.
    if stated := re.match(r"[`:# ]*([\d.]+) GiB", after):
        digits = len(stated[1].partition(".")[2])
        assert f"{need:.{digits}f}" == stated[1]
