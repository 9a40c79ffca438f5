"""Compare whole outputs of the tools with those on record: any change of a figure or a word shows.

    make records     rewrite the records; read the difference before you commit it

Each file in tests/records/ lists commands after "$". Below each stands what it printed and wrote to OUT.
RUNS holds made-up runs of two machines; SLOWER and FASTER hold the same runs at other speeds. PAIR
holds the traces of two ranks, and RANKS made-up traces of three. TOKENS is a file of tokens. Training
reads a clock that advances with each reading.

These commands are no tools. `pairs` prints what a script says of two flags on eight ranks, unless it
says that of one alone. `plan` prints a script's plan, `model` a config's model, and `show` a result as
its run did. `read` prints all that a log holds.
`rank` ranks a sweep's rows.
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
import pprint
import re
import shlex
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llm_train_bench.base.errors import UsageError
from llm_train_bench.base.hardware import devices
from llm_train_bench.compare.find_results import read_records
from llm_train_bench.compare.gate import own_runs
from llm_train_bench.compare.read_logs import log_facts
from llm_train_bench.compare.save_runs import save_runs
from llm_train_bench.formulas.flops import flops_per_token
from llm_train_bench.formulas.memory_model import estimate_memory
from llm_train_bench.formulas.parameters import count_parameters
from llm_train_bench.model.config import ConfigError, parse_config
from llm_train_bench.results.console import print_result
from llm_train_bench.results.figures import matmul_work
from llm_train_bench.results.schema import Lineage, Result
from llm_train_bench.run.provenance import default_name, open_result
from tests import conftest
from tests.helpers import FAMILIES, ROOT, config, plan_of, run_train, words
from tests.test_trace import TRACES, rank_trace

RECORDS = ROOT / "tests/records"
NAMES = ("RUNS", "SLOWER", "FASTER", "BASE", "PAIR", "RANKS", "TOKENS")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?")
READ = (".html", ".json", ".jsonl", ".csv", ".md", ".prom", ".txt")
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
# What differs between machines, runs and versions of PyTorch.
VARIES = re.compile(
    r'"(peak_rss_gib|memory_mean_gib|id|boot|pid|started|began|started_at|ended_at|os|python|torch|numpy|'
    r'torchao|triton|cuda|hip|cudnn|nccl|driver|nodes|balancing|cpu_count|torch_threads|OMP_NUM_THREADS|git_\w+|TORCHINDUCTOR_CACHE_DIR|host|energy_source|hash)":|'
    r"torch, commit|very roughly|memory: resident|peak_rss_gib \[|Skipping import of cpp"
)


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
        mock.patch("llm_train_bench.run.window.cpu_seconds", lambda: next(used)),
        mock.patch("os.sched_getaffinity", lambda pid: {0, 1}, create=True),
    ):
        yield


def write_runs(directory: Path, slower: float = 1.0) -> None:
    """Results of SETTINGS; a run's speed is up to 0.9 % off its setting's, a step's up to 3 %."""
    plain = (ROOT / "tests/sample/plain/result.json").read_text()
    for i, (hardware, flags, speed, gib, joules, n) in enumerate(SETTINGS):
        for k in range(n):
            r, rate = json.loads(plain), 5e4 * speed * slower * (1 + 0.003 * ((i + 2 * k) % 7 - 3))
            times = [
                128 / rate * (1 + 0.01 * ((j * (k + 3)) % 7 - 3))
                for j in range(35 + 115 * (k == 1))
            ]
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
    files = sorted(RECORDS.glob("*.txt"))
    parts = [(f, re.split(r"^\$ ", f.read_text(), flags=re.M)[1:]) for f in files]
    return [
        (file, *part.rstrip().partition("\n")[::2]) for file, entries in parts for part in entries
    ]


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


def output_of(command: str) -> str:
    """Exit code, what a tool says and what it writes, without the names of this checkout."""
    variables, rest = re.fullmatch(r"((?:[A-Z_]+=\S+ )*)(.*)", command, re.S).groups()
    (script, *argv), code = shlex.split(rest), None
    environment = mock.patch.dict(os.environ, [v.split("=", 1) for v in variables.split()])
    with tempfile.TemporaryDirectory() as top, environment:
        out, places = Path(top), inputs() | {"OUT": top}
        devices.cache_clear()
        argv = [functools.reduce(lambda w, p: w.replace(*p), places.items(), word) for word in argv]
        with (
            contextlib.redirect_stdout(io.StringIO()) as said,
            contextlib.redirect_stderr(io.StringIO()) as warned,
            contextlib.suppress(SystemExit),
        ):
            if script == "train.py":
                with counting_clock(), mock.patch("sys.argv", [script, *argv]):
                    code = run_train(*argv, "--output-dir", out)
            elif script in PSEUDO:
                code = PSEUDO[script](argv) or 0
            else:
                code = importlib.import_module(script.removesuffix(".py")).main(argv)
        text = said.getvalue() + "".join(f"! {line}\n" for line in warned.getvalue().splitlines())
        for path in sorted(out.rglob("*")):
            if path.name.startswith("events."):
                events = EventAccumulator(str(path)).Reload()
                for tag in sorted(events.Tags()["scalars"]):
                    text += f"{tag} {[(e.step, e.value) for e in events.Scalars(tag)]}\n"
            if path.is_file() and path.suffix in READ:
                content = path.read_text()
                if content.startswith('{"traceEvents"'):
                    events = json.loads(content).pop("traceEvents")
                    content = "\n".join(" ".join(map(str, event.values())) for event in events)
                text += f"> {path.relative_to(out)}\n{content}\n"
        for name, place in {**places, "HOME": os.environ["HOME"], "": f"{ROOT}/"}.items():
            text = text.replace(place, name)
        for pattern, name in CHANGES:
            text = re.sub(pattern, name, text)
        text = re.sub(r"<style>.*?</style>|<script>.*?</script>", "", text, flags=re.S)
    devices.cache_clear()
    lines = [line.rstrip() for line in text.splitlines()]
    kept = [line for line in lines if line and not VARIES.search(line)]
    return "\n".join([*kept, f"exit {code}"])


def say_pairs(argv: list[str]) -> None:
    """Print refusals, and notes of the plan, of every two of the flags in `argv`."""
    script, config, *flags = argv

    def said(*chosen: str) -> list[str]:
        try:
            return list(plan_of(words(config, *chosen), script, 8).notes)
        except UsageError as error:
            return [str(error)]

    alone = {flag: said(flag) for flag in flags}
    for flag, texts in alone.items():
        print(f"{flag}: {'; '.join(texts)}")
    for a, b in itertools.combinations(flags, 2):
        if texts := [text for text in said(a, b) if text not in alone[a] + alone[b]]:
            print(f"{a} {b}: {'; '.join(texts)}")


def say_plan(argv: list[str]) -> None:
    """Print a plan and what follows from it: parameters, FLOPs, matmuls, memory, bytes of collectives."""
    script, ranks, model, *flags = argv
    model, _, changes = model.partition("+")
    family = config(model, **json.loads(changes or "{}")) if model in FAMILIES else None
    try:
        plan = plan_of([model, *flags], script, int(ranks), config=family)
    except UsageError as error:
        print(error)
        return
    work, args = plan.work, [plan.schedule, plan.flex, plan.notes, plan.optimizer]
    sizes = work.config, work.batch.seq_len
    counts = [flops_per_token(*sizes, causal, work.pass_type) for causal in (False, True)]
    fp8 = mock.Mock(n_parameters=1e6, emulated=False) if work.fp8 else None
    on_h100 = mock.Mock(fp8=fp8, device=mock.Mock(roof_bf16_tflops=700.0, roof_fp8_tflops=1200.0))
    counts += [count_parameters(work.config), matmul_work(on_h100, work)]
    lineage = Lineage(id="", name="r", attempt=0, began=0.0, started=0.0)
    named = re.sub(r"^\d+-\d+-|-\d+$", "", default_name(model, vars(plan.args)))
    begun = open_result(plan, torch.device("cpu"), None, None, named, lineage)
    known = {name: value for name, value in begun.metrics if value is not None}
    for each in (work, *args, counts, plan.traffic, known, begun.texts("information"), named):
        pprint.pprint(each, width=100, compact=True)
    for stage in range(work.fsdp.pp):
        pprint.pprint(estimate_memory(work, pp_rank=stage), width=100)


def say_model(argv: list[str]) -> None:
    """Print a config, or what changes of its keys make of it; "absent" removes one.

    The config is one of `helpers` or, as `fewest-FAMILY`, has the fewest keys.
    """
    name, *changes = argv
    keys = FAMILIES.get(name) or FEWEST | {"model_type": name.removeprefix("fewest-")}
    plain = parse_config(keys, "x.json")
    if not changes:
        pprint.pprint(plain, compact=True)
    for change in map(json.loads, changes):
        changed = {k: v for k, v in (keys | change).items() if v != "absent"}
        try:
            fields = vars(parse_config(changed, "x.json")).items()
            print({k: v for k, v in fields if v != getattr(plain, k) and k != "raw"})
        except ConfigError as error:
            print(error)


def show(argv: list[str]) -> None:
    """Print a result, with some `fields.of.it=JSON` changed, as its run did, and what follows from it."""
    path, *changes = argv
    content = json.loads(Path(path).read_text())
    for change in changes:
        name, _, value = change.partition("=")
        *parts, last = name.split(".")
        functools.reduce(dict.__getitem__, parts, content)[last] = json.loads(value)
    result = Result.model_validate(content)
    print_result(result)
    for name in ("invalid", "peak_memory", "power_limit_w"):
        print(name, getattr(result, name))


def say_records(argv: list[str]) -> None:
    """Print all that is read from each file."""
    path, *facts = argv
    for record in read_records([path], print, log_facts(facts, None)):
        pprint.pprint(dataclasses.replace(record, result=None, steps=[]), width=100, compact=True)


PSEUDO = dict(
    pairs=say_pairs, plan=say_plan, model=say_model, show=show, read=say_records,
)  # fmt: skip


def split(text: str) -> tuple[list[str], list[float]]:
    """Words and numbers."""
    return NUMBER.split(text), [float(n.replace(",", "")) for n in NUMBER.findall(text)]


@pytest.mark.parametrize(
    ("command", "expected"), [pytest.param(c, o, id=c[:80]) for _, c, o in recorded()]
)
def test_output_is_the_one_on_record(command, expected):
    words, numbers = split(output_of(command))
    expected_words, expected_numbers = split(expected)
    assert words == expected_words
    # Another CPU adds up otherwise.
    trained = 2e-2 if re.search("--amp [bf]", command) else 1e-3
    rel = trained if command.startswith("train.py") else 1e-6
    assert numbers == pytest.approx(expected_numbers, rel=rel)


if __name__ == "__main__":
    conftest.invent_a_machine()
    known = recorded()
    for file in sorted(RECORDS.glob("*.txt")):
        entries = [f"$ {c}\n{output_of(c)}\n" for f, c, *_ in known if f == file]
        file.write_text("\n".join(entries))
        print(file.name, len(entries), file=sys.stderr)
