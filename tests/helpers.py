"""Small configs of every family, and running train.py inside the test process."""

import contextlib
import copy
import itertools
import json
import operator
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from llm_train_bench.apply.sharded import materialize
from llm_train_bench.compare.find_results import read_records
from llm_train_bench.compare.records import LogFacts, Record
from llm_train_bench.model.config import ModelConfig, parse_config
from llm_train_bench.model.options import AttentionKernel, ModelOptions
from llm_train_bench.model.transformer import Transformer
from llm_train_bench.settings.command_line import parse_args
from llm_train_bench.settings.flags import Script
from llm_train_bench.settings.plan import Plan, make_plan

ROOT = Path(__file__).parent.parent

LLAMA = dict(
    model_type="llama", vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
    num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
    rope_theta=500.0,
)  # fmt: skip
# The smallest config of each family, with its own keys, and some variants.
FAMILIES = {
    path.stem: json.loads(path.read_text())
    for path in sorted((ROOT / "tests/configs").glob("*.json"))
    if json.loads(path.read_text()).get("model_type") == path.stem
}
FAMILIES |= {
    "llama-linear-tied": LLAMA
    | dict(tie_word_embeddings=True, mlp_bias=True, rope_scaling=dict(type="linear", factor=2.0)),
    "llama-yarn": LLAMA
    | dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)),
    "moonlight": LLAMA
    | dict(model_type="deepseek_v3", num_key_value_heads=6, n_routed_experts=6, num_experts_per_tok=2,
           n_group=1, topk_group=1, moe_intermediate_size=24, n_shared_experts=1,
           first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=12,
           qk_rope_head_dim=8, v_head_dim=10, num_nextn_predict_layers=0, rope_interleave=False),
}  # fmt: skip


def config(family: str, **changes) -> ModelConfig:
    return parse_config(FAMILIES[family] | changes, f"{family}.json")


def built(config, seed=0, seq_len=16, masked="pieces", balanced=False, weights=None, **options):
    """A model on the CPU, with the initial values of a seed or with weights of a file."""
    with torch.device("meta"):
        chosen = ModelOptions(AttentionKernel("auto", masked), balanced)
        model = Transformer(config, seq_len, chosen, **options)
    materialize(model, torch.device("cpu"), seed, weights)
    return model


def plan_of(argv, script="train.py", world=1, platform="nvidia", config=None) -> Plan:
    """The plan of a command line, on a model that is read already if `config` is given."""
    return make_plan(parse_args([*map(str, argv)], script), Script(script), world, platform, config)


def write_config(directory: Path, values: dict) -> str:
    path = directory / "config.json"
    path.write_text(json.dumps(values))
    return str(path)


def remark_texts(result: dict) -> list[str]:
    """The remarks of a result.json's content, each with its advice."""
    remarks = result["remarks"]
    return [": ".join(filter(None, (r["text"], r["advice"]))) for r in remarks]


def noted(result: dict, text: str) -> bool:
    """Whether one of the remarks has this text."""
    return any(text in remark for remark in remark_texts(result))


def words(*parts) -> list[str]:
    """An argument list: a text is split at its spaces; lists, paths and numbers stay whole."""
    split = (p.split() if isinstance(p, str) else p if isinstance(p, list) else [p] for p in parts)
    return [str(word) for word in itertools.chain(*split)]


def python(*parts, code=0, cwd=ROOT, **environment) -> subprocess.CompletedProcess:
    """What a new Python process prints, in the repository's root, after a check of its exit code."""
    command, environment = [sys.executable, *words(*parts)], os.environ | environment
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def train_main(argv: list) -> int:
    """`train.py`, called as the other tools are."""
    return run_train(*argv)


def run_train(*argv: str) -> int:
    """Exit code of `train.py ARGV...`, in this process."""
    import train
    from llm_train_bench.run.launch import launch

    # Dynamo refuses to compile one function for more than eight models, as it should in one run.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    return launch(train.train, [str(a) for a in argv], "train.py")


# PyTorch does not quote its own path where it calls the C++ compiler.
INDUCTOR_LINKS = " " not in torch.__file__


@contextlib.contextmanager
def without_inductor():
    """torch.compile captures, differentiates and runs its graphs, but generates no code for them."""
    compile_ = torch.compile

    def traced(function, mode=None, **options):
        return compile_(function, backend="aot_eager", **options)

    with mock.patch("torch.compile", traced):
        yield


def result_of(run: Path, name="result.json") -> dict:
    """A run's result, or another JSON file beside it."""
    return json.loads((run / name).read_text())


def facts_of(run: Path) -> dict:
    """What tests.dist_worker has seen of a run."""
    return result_of(run, "counts.json")


def only_result(output_dir: Path) -> dict:
    """The one result.json under a directory."""
    (path,) = output_dir.glob("*/result.json")
    return result_of(path.parent)


def trained(output_dir: Path, *parts) -> dict:
    """The result of `train.py PARTS...`, run in this process."""
    assert run_train(*words(*parts, "--output-dir", output_dir)) == 0
    return only_result(output_dir)


def records_of(*paths, facts: LogFacts | None = None) -> list[Record]:
    """The runs that compare.py reads in these files and directories."""
    return read_records(map(str, paths), print, facts or LogFacts())


def read_steps(output_dir: Path) -> list[dict]:
    (path,) = output_dir.glob("*/steps.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def places(content: Any, path: list[str]) -> Iterator[tuple[Any, Any]]:
    """Each container that a path leads to, and the key there; 3 is a place in a list, 3: are several."""
    name, *rest = path
    keys = [name]
    if isinstance(content, list):
        bounds = [int(bound) if bound else None for bound in name.split(":")]
        keys = range(len(content))[slice(*bounds)] if ":" in name else bounds
    for key in keys:
        yield from places(content[key], rest) if rest else [(content, key)]


def changed(content: Any, changes: str = "", **fields) -> Any:
    """A copy of JSON in which `a.b=JSON` sets, `a.b*=2` and `a.b+=2` compute, `a.b=absent` removes.

    Fields are set by `a__b`.
    """
    content = copy.deepcopy(content)
    for name, value in fields.items():
        for place, key in places(content, name.split("__")):
            place[key] = value
    for change in filter(None, re.split(r" (?=[\w.:]+[*+]?=)", changes.strip())):
        path, how, value = re.fullmatch(r"(.+?)([*+]?=)(.*)", change).groups()
        for place, key in reversed([*places(content, path.split("."))]):
            if value == "absent":
                del place[key]
            elif how == "=":
                place[key] = json.loads(value)
            elif place[key] is not None:
                compute = operator.mul if how == "*=" else operator.add
                place[key] = compute(place[key], json.loads(value))
    return content


def rows_of(name: str) -> list[str]:
    """The lines of a file of tests/results."""
    rows = (ROOT / "tests/results" / name).read_text().splitlines()
    return [row for row in rows if not row.startswith("#")]


def answers(name: str) -> list[list[str]]:
    """The rows of a file of tests/results: what is given, and what follows from it."""
    return [row.split(" -> ") for row in rows_of(name)]


def cases(section: str) -> list[list[str]]:
    """The rows of a section of tests/changed_results.txt: changes, and what follows from them."""
    text = (ROOT / "tests/changed_results.txt").read_text()
    (rows,) = re.findall(rf"^\[{section}\].*\n((?:.+\n)*)", text, flags=re.M)
    return [row.split(" -> ") for row in rows.splitlines()]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
