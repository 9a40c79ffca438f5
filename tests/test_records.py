"""Compare what the tools say and compute with what is on record: a change of a figure or a word shows.

    make records     rewrite the records; read the difference before you commit it

Each file in tests/records/ lists commands after "$", and below each its whole output, with the files in
OUT. In figures.txt this is a line with the numbers in the JSON; those of a list are added up. In
refusals.txt the one line that refuses a command stands behind "->".

RUNS holds made-up runs of two machines; SLOWER and FASTER hold the same runs at other speeds. PAIR holds
the traces of two ranks, and RANKS made-up traces of three. TOKENS is a file of tokens. Training reads a
clock that advances with each reading. Other inputs are in tests/inputs.

These commands are no tools. `pairs` prints what a script says of two flags on eight ranks, unless it
says that of one alone. `plan` has the figures of a script's plan, `model` those of a config, and `read`
those of a log. `keys` prints what changes of a config's keys make of it, and `show` what a run prints.
"""

import atexit
import contextlib
import dataclasses
import functools
import importlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import devices
from llm_train_bench.compare.gate import own_runs
from llm_train_bench.compare.read_logs import log_facts
from llm_train_bench.compare.save_runs import save_runs
from llm_train_bench.formulas.flops import flops_per_token
from llm_train_bench.formulas.memory_model import estimate_memory
from llm_train_bench.formulas.parameters import count_parameters
from llm_train_bench.model.config import ConfigError, list_layers, parse_config
from llm_train_bench.results import result_files
from llm_train_bench.results.console import print_result
from llm_train_bench.results.figures import matmul_work
from llm_train_bench.results.schema import Attempt, Result
from llm_train_bench.run.provenance import open_result
from tests import conftest
from tests.helpers import FAMILIES, ROOT, changed, config, plan_of, records_of, run_train, words
from tests.test_trace import TRACES, rank_trace

RECORDS = ROOT / "tests/records"
FIGURES, REFUSALS = "figures.txt", "refusals.txt"
NAMES = ("RUNS", "SLOWER", "FASTER", "BASE", "PAIR", "RANKS", "TOKENS")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?")
WRITTEN = (".html", ".csv", ".md", ".txt")
CHANGES = (
    (r"\d{4}-\d\d-\d\d(T[\d:+]+)?", "DATE"),
    (r'("version": |, |bench )"?0\.\d+\.\d+\S*', "VERSION"),
    (r" id='\d+'", ""),
)
# Device, flags that differ, speed, memory [GiB], energy [J], number of runs.
SETTINGS = (
    ("MI300X", {}, 0.93, 71.5, 900.0, 3),
    ("MI300X", {"pt_compile": True}, 1.21, 60.0, 700.0, 4),
    ("H100 SXM", {}, 1.0, 70.0, 800.0, 5),
    ("H100 SXM", {"pt_compile": True}, 1.3, 61.5, None, 4),
    ("H100 SXM", {"bsz": 4, "sac_freq": "1/2"}, 0.984, 44.0, 810.0, 3),
    ("H100 SXM", {"bsz": 8, "lr": 1e-3}, 1.003, None, 800.0, 2),
)
FEWEST = dict(vocab_size=130000, hidden_size=64, intermediate_size=96, num_hidden_layers=30)
FEWEST |= dict(num_attention_heads=32)
# Figures and lines that differ between machines, runs and versions of PyTorch.
VARYING = ("peak_rss_gib", "memory_mean_gib", "final/peak_rss_gib")
VARIES = re.compile(r"torch, commit|memory: resident|peak_rss_gib \[|Skipping import of cpp")


@contextlib.contextmanager
def counting_clock():
    """Every reading of a clock by the main thread is later than the one before, by 1 to 5 / 1024 s.

    The machine has two cores. Of their time in the window 10 % went to others, and 3 % was stolen.
    """

    def clock(now: float):
        readings = itertools.cycle([k / 1024 for k in (2, 3, 4, 5, 1)])

        def read() -> float:
            nonlocal now
            if threading.current_thread() is threading.main_thread():
                now += next(readings)
            return now

        return read

    starts = {"perf_counter": 1000.0, "monotonic": 2000.0, "time": 1.8e9}
    used = itertools.cycle([(100.0, 50.0, 2.0, 10.0), (200.0, 90.0, 5.0, 40.0)])
    with (
        mock.patch.multiple(time, **{name: clock(start) for name, start in starts.items()}),
        mock.patch.object(result_files, "_EPOCH", 1.8e9),
        mock.patch("llm_train_bench.run.measured_window.cpu_seconds", lambda: next(used)),
        mock.patch("os.sched_getaffinity", lambda pid: {0, 1}, create=True),
    ):
        yield


def write_runs(directory: Path, slower: float = 1.0) -> None:
    """Results of SETTINGS; a run's speed is up to 0.9 % off its setting's, a step's up to 3 %."""
    plain = (ROOT / "tests/sample/plain/result.json").read_text()
    for i, (hardware, flags, speed, gib, joules, n) in enumerate(SETTINGS):
        for k in range(n):
            r, rate = json.loads(plain), 5e4 * speed * slower * (1 + 0.003 * ((i + 2 * k) % 7 - 3))
            steps = range(35 + 115 * (k == 1))
            times = [128 / rate * (1 + 0.01 * ((j * (k + 3)) % 7 - 3)) for j in steps]
            r["run_name"], r["step_times_s"] = f"run-{i}-{k}", times
            r["args"] |= flags | {"amp": "bf16"}
            r["device"] |= {"type": "cuda", "name": hardware, "hardware": hardware}
            r["metrics"] |= {
                "tokens_per_sec": rate, "tokens_per_sec_per_gpu": rate, "n_measured_steps": len(times),
                "step_time_ci95_low_s": 126 / rate, "step_time_ci95_high_s": 130 / rate,
                "step_time_mean_s": 128 / rate, "step_time_median_s": 128 / rate, "mfu": rate / 2e5,
                "peak_allocated_gib": gib, "energy_j": joules, "average_power_w": joules,
                "tokens_per_joule": joules and rate / joules, "energy_source": "nvml total energy",
            }  # fmt: skip
            (directory / r["run_name"]).mkdir(parents=True)
            (directory / r["run_name"] / "result.json").write_text(json.dumps(r))


def recorded() -> list[tuple[Path, str, str]]:
    """File, command and output of everything on record."""
    rows = []
    for file in sorted(RECORDS.glob("*.txt")):
        text = file.read_text()
        if file.name == REFUSALS:
            parts = [line.partition(" -> ") for line in text.splitlines()]
        else:
            parts = [e.partition("\n") for e in re.split(r"^\$ ", text, flags=re.M)[1:]]
        rows += [(file, command, output.rstrip()) for command, _, output in parts]
    return rows


def figures(content: Any, name: str = "") -> dict[str, float]:
    """The numbers in nested data that are not 0; of a list their sum, and how many entries it has."""
    if dataclasses.is_dataclass(content):
        content = vars(content)
    found: Counter[str] = Counter()
    if isinstance(content, dict):
        for key, value in content.items():
            found.update({} if key in VARYING else figures(value, f"{name}.{key}".strip(".")))
    elif isinstance(content, list | tuple):
        found[f"{name}.n"] += len(content)
        for value in content:
            found.update(figures(value, name))
    elif isinstance(content, bool | int | float):
        found[name] += content
    return {key: value for key, value in found.items() if value}


@functools.cache
def inputs() -> dict[str, str]:
    """The directories that commands name."""
    top = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, top)
    write_runs(top / "runs")
    write_runs(top / "slower", 0.93)
    write_runs(top / "faster", 1.35)
    save_runs(own_runs([top / "runs"], top / "base"), top / "base")
    (top / "tokens").write_bytes(bytes(7 * i * i % 251 * (i % 2 == 0) for i in range(4000)))
    (top / "pair").mkdir()
    for i, name in enumerate(("training", "training_rank1")):
        shutil.copy(TRACES / f"cuda_h100_{name}.json.gz", top / f"pair/rank{i}.json.gz")
    (top / "ranks").mkdir()
    for i, late in enumerate((0, 2000, 500)):
        rank_trace(top / "ranks", i, late, calls=3, n_steps=3)
    return {name: f"{top}/{name.lower()}" for name in NAMES}


def output_of(command: str, file: str) -> str:
    """What a file of records has of a command: names of this checkout are left out."""
    variables, rest = re.fullmatch(r"((?:[A-Z_]+=\S+ )*)(.*)", command, re.S).groups()
    (script, *argv), code = shlex.split(rest), None
    environment = mock.patch.dict(os.environ, [v.split("=", 1) for v in variables.split()])
    with tempfile.TemporaryDirectory() as top, environment:
        out, places = Path(top), inputs() | {"OUT": top}
        devices.cache_clear()
        argv = [functools.reduce(lambda w, p: w.replace(*p), places.items(), word) for word in argv]
        if script in DATA:
            try:
                return line_of(DATA[script](argv))
            except UsageError as error:
                return str(error)
        with (
            contextlib.redirect_stdout(io.StringIO()) as said,
            contextlib.redirect_stderr(io.StringIO()) as warned,
            contextlib.suppress(SystemExit),
        ):
            if script == "train.py":
                with counting_clock(), mock.patch("sys.argv", [script, *argv]):
                    code = run_train(*argv, "--output-dir", out)
            elif script in PRINTED:
                code = PRINTED[script](argv) or 0
            else:
                code = importlib.import_module(script.removesuffix(".py")).main(argv)
        devices.cache_clear()
        if file == FIGURES:
            return line_of(written(out) or json.loads(said.getvalue()))
        text = said.getvalue() + "".join(f"! {line}\n" for line in warned.getvalue().splitlines())
        for path in sorted(out.rglob("*")):
            if file != REFUSALS and path.is_file() and path.suffix in WRITTEN:
                text += f"> {path.relative_to(out)}\n{path.read_text()}\n"
        for name, place in {**places, "HOME": os.environ["HOME"], "": f"{ROOT}/"}.items():
            text = text.replace(place, name)
        for pattern, name in CHANGES:
            text = re.sub(pattern, name, text)
        text = re.sub(r"<style>.*?</style>|<script>.*?</script>", "", text, flags=re.S)
    lines = [line.rstrip() for line in text.splitlines()]
    if file == REFUSALS:
        (line,) = lines
        return line.removeprefix(f"! {script}: ") + f" (exit {code})" * (code != 2)
    kept = [line for line in lines if line and not VARIES.search(line)]
    return "\n".join([*kept, f"exit {code}"] if code else kept)


def written(out: Path) -> dict[str, Any]:
    """Content of the JSON and event files of a directory."""
    content: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        if path.suffix in (".json", ".jsonl"):
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            content[path.stem] = [*map(json.loads, lines)]
        elif path.name.startswith("events."):
            events = EventAccumulator(str(path)).Reload()
            tags = events.Tags()["scalars"]
            content |= {tag: [e.value for e in events.Scalars(tag)] for tag in tags}
    for result in content.pop("result", []):
        content |= {name: result[name] for name in ("remarks", "observed", "metrics", "profile")}
    return content


def line_of(content: Any) -> str:
    """The figures of data in one line."""
    return " ".join(f"{name} {value:.9g}" for name, value in figures(content).items())


def say_pairs(argv: list[str]) -> None:
    """Print refusals, and notes of the plan, of every two of the flags in `argv`."""
    script, config, *flags = argv

    def said(*chosen: str) -> list[str]:
        try:
            return list(plan_of(words(config, *chosen), script, 8).notes)
        except UsageError as error:
            return [str(error)]

    alone, pairs = {flag: said(flag) for flag in flags}, defaultdict(list)
    for flag, texts in alone.items():
        for text in texts:
            pairs[text].append(flag)
    for a, b in itertools.combinations(flags, 2):
        for text in said(a, b):
            if text not in alone[a] + alone[b]:
                pairs[text].append(f"{a} {b}")
    for text, chosen in pairs.items():
        print(f"{text} [{' | '.join(chosen)}]")


def plan_figures(argv: list[str]) -> Any:
    """A plan and what follows from it: parameters, FLOPs, matmuls, memory, bytes of collectives."""
    script, ranks, model, *flags = argv
    model, _, changes = model.partition("+")
    family = config(model, **json.loads(changes or "{}")) if model in FAMILIES else None
    plan = plan_of([model, *flags], script, int(ranks), config=family)
    work, sizes = plan.work, (plan.work.config, plan.work.batch.seq_len)
    flops = [flops_per_token(*sizes, causal, work.pass_type) for causal in (False, True)]
    fp8 = mock.Mock(recipe=work.fp8.recipe, emulated=False) if work.fp8 else None
    on_h100 = mock.Mock(fp8=fp8, device=mock.Mock(roof_bf16_tflops=700.0, roof_fp8_tflops=1200.0))
    matmul_flops, ideal_s = matmul_work(on_h100, work)
    start = mock.Mock(directory=Path("r"), run_id="", attempts=[Attempt()])
    begun = open_result(plan, plan.schedule, torch.device("cpu"), None, None, start)
    return {
        "n": count_parameters(work.config), "palm": flops[0], "causal": flops[1],
        "matmul": matmul_flops, "ideal_s": ideal_s, "batch": work.batch, "schedule": plan.schedule,
        "blocks": work.recompute.blocks, "shards": work.parallelism.shards,
        "layers": work.parallelism.layers, "known": begun.metrics.model_dump(),
        "memory": [estimate_memory(work, pp_rank=stage) for stage in range(work.parallelism.pp)],
    }  # fmt: skip


def keys_of(name: str) -> dict[str, Any]:
    """A config of `helpers` or, as `fewest-FAMILY`, one with the fewest keys."""
    return FAMILIES.get(name) or FEWEST | {"model_type": name.removeprefix("fewest-")}


def say_changes(argv: list[str]) -> None:
    """Print what changes of a config's keys make of it; "absent" removes one."""
    name, *changes = argv
    for change in changes:
        changed = {k: v for k, v in (keys_of(name) | json.loads(change)).items() if v != "absent"}
        try:
            configs = [parse_config(values, "x.json") for values in (keys_of(name), changed)]
            plain, ours = (vars(config) | list_layers(config) for config in configs)
            print({k: v for k, v in ours.items() if v != plain[k] and k not in ("raw", "layers")})
        except ConfigError as error:
            print(error)


def show(argv: list[str]) -> None:
    """Print a result as its run did, and its verdicts; after `fields.of.it=JSON` what is new."""
    path, *changes = argv

    def table(*changes: str) -> list[str]:
        content = changed(json.loads(Path(path).read_text()), " ".join(changes))
        result = Result.model_validate(content)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            print_result(result)
            for name in ("invalid", "peak_memory", "power_limit_w"):
                print(name, getattr(result, name))
        return [re.sub(" +|-+", " ", line) for line in said.getvalue().splitlines()]

    before = table() if changes else []
    print(*(line for line in table(*changes) if line not in before), sep="\n")


def read_figures(argv: list[str]) -> Any:
    """What is read from a file, with these facts of --log."""
    path, *facts = argv
    return records_of(path, facts=log_facts(facts, None))


DATA = {
    "plan": plan_figures,
    "model": lambda argv: parse_config(keys_of(*argv), "x.json"),
    "read": read_figures,
}
PRINTED = {"pairs": say_pairs, "keys": say_changes, "show": show}


def split(text: str) -> tuple[list[str], list[float]]:
    """Words and numbers."""
    return NUMBER.split(text), [float(n.replace(",", "")) for n in NUMBER.findall(text)]


@pytest.mark.parametrize(
    ("file", "command", "expected"), [pytest.param(*row, id=row[1][:80]) for row in recorded()]
)
def test_output_is_the_one_on_record(file, command, expected):
    words, numbers = split(output_of(command, file.name))
    expected_words, expected_numbers = split(expected)
    assert words == expected_words
    # Another CPU adds up otherwise.
    trained = 2e-2 if re.search("--amp [bf]", command) else 1e-3
    rel = trained if command.startswith("train.py") else 1e-6
    assert numbers == pytest.approx(expected_numbers, rel=rel)


def main() -> None:
    conftest.invent_a_machine()
    known = recorded()
    for file in sorted(RECORDS.glob("*.txt")):
        outputs = [(c, output_of(c, file.name)) for f, c, _ in known if f == file]
        if file.name == REFUSALS:
            text = "".join(f"{command} -> {output}\n" for command, output in outputs)
        else:
            gap = "" if file.name == FIGURES else "\n"
            text = gap.join(f"$ {command}\n{output}\n" for command, output in outputs)
        file.write_text(text)
        print(file.name, len(outputs), file=sys.stderr)


if __name__ == "__main__":
    main()
