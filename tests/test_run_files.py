"""Files of runs: what --save writes and leaves out, what --verify finds wrong, two writers, versions."""

import hashlib
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

import check
import compare
from llm_train_bench.base import files
from llm_train_bench.compare.gate import unusable
from llm_train_bench.compare.read_results import records_of_file
from llm_train_bench.compare.run_files import MOST_BYTES
from llm_train_bench.compare.setting import identity
from llm_train_bench.settings import flags
from llm_train_bench.settings.command_line import parse_args
from tests import helpers
from tests.helpers import ROOT, cases, changed, records_of, result_of, words

SHARED = ROOT / "results/h200-sxm/llm-train-bench/gpt2-125m-bf16-20261127.json"
FP8 = ROOT / "results/h200-sxm/llm-train-bench/llama-8b-proxy-fp8-20261127.json"
RUN = ROOT / "benchmarks/results/h200-20261127/gpt2-125m-bf16"


def only_run(content) -> dict:
    return content["settings"][0]["runs"][0]


def shared(changes="", path=SHARED) -> dict:
    """A file of one run with changes of it."""
    content = json.loads(path.read_text())
    content["settings"][0]["runs"][0] = changed(only_run(content), changes)
    return content


@pytest.fixture
def told(tmp_path, capsys):
    """What --verify prints of a content, and its exit code."""

    def verify(content, *more) -> tuple[str, int]:
        path = tmp_path / "told.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        code = check.main(["--verify", str(path), *more])
        return "".join(capsys.readouterr()), code

    return verify


@pytest.mark.parametrize(("changes", "expected"), cases("wrong"))
def test_a_contradiction_is_named(changes, expected, told):
    text, code = told(shared(changes))
    wrong = next(line for line in text.splitlines() if "  wrong: " in line)
    assert code == 1 and any(part in wrong for part in expected.split("|")), text


@pytest.mark.parametrize(("changes",), [[""], *cases("honest")])
def test_an_honest_file_is_consistent(changes, told):
    text, code = told(shared(changes))
    assert code == 0, text
    assert "losses and gradient norms of steps 0 to 4 of gpt2-125m" in text
    assert "not checked: losses from step 5 on; readings of sensors" in text


def test_fp8_losses_have_a_wider_band_than_bf16(told):
    assert "the loss of step 3 is" in told(shared("steps.3.loss+=0.02", FP8))[0]


def test_every_file_of_results_is_consistent_and_one_page_shows_all(tmp_path, capsys):
    paths = list((ROOT / "results").glob("*/*/*.json"))
    assert len(paths) >= 6
    for path in paths:
        assert check.main(["--verify", str(path)]) == 0, capsys.readouterr().out
        assert not any(map(unusable, records_of_file(path)))
    assert compare.main([str(ROOT / "results"), "--output-dir", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "H200 SXM" in page and "548,540" in page
    printed = capsys.readouterr()
    assert "| FP8, fp8-backend torchao" in printed.out and "shares" not in printed.err


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is not a file of runs"), ("[" * 100_000, "nested"),
     ('{"a": ' * 70 + "1" + "}" * 70, "nested"), (" " * (MOST_BYTES + 1), "is larger than"),
     (json.dumps({"schema_version": 5, "settings": [
         {"setting": "x", "runs": [{"result": {}, "steps": [{"a": 1}] * 9999}]}]}), "runs.0"),
     (SHARED.read_text().replace('{"setting"', '{"tolerance": 1.5, "setting"'), "tolerance"),
     (SHARED.read_text().replace('"window_s": ', '"window_s": "x", "y": '), "window_s")],
)  # fmt: skip
def test_what_is_no_such_file_is_one_line(text, message, told):
    said, code = told(text)
    assert code == 2 and said.count("\n") == 1 and message in said


def test_verification_needs_no_torch_and_has_json():
    code = f"""
import sys
sys.modules["torch"] = None
import check
sys.exit(check.main(["--verify", {str(SHARED)!r}, "--json"]))
"""
    (row,) = json.loads(helpers.python(["-c", code]).stdout)
    assert row["wrong"] == []
    assert row["setting"].startswith("H200 SXM x 1: gpt2-125m, train.py, T 1024")


# --- what leaves the machine -----------------------------------------------------------------------

SECRETS = {
    "host": "gpu-node-17.corp.example", "user": "j.doe-private", "token": "hf_" + "Q" * 30,
    "github": "ghp_" + "Z" * 36, "password": "hunter2hunter2", "mail": "jane.doe@corp.example",
    "address": "10.20.30.40", "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "project": "secret-project-path", "hex": "deadbeef" * 5, "google": "AIza" + "S" * 35,
    "hook": "hooks.example/T00/B00/x", "bucket": "s3://acme-private/x", "v6": "fe80::a1b2:c3d4",
}  # fmt: skip


def test_nothing_private_leaves_the_machine(tmp_path, capsys):
    """Planted in every text of a result, in new keys, and where runs really keep such texts."""
    run = tmp_path / SECRETS["project"] / "run"
    run.mkdir(parents=True)
    (run / "steps.jsonl").write_text((RUN / "steps.jsonl").read_text())
    every = " ".join(SECRETS.values())
    home = f"/home/{SECRETS['user']}/{SECRETS['project']}"
    texts = words("run_name linear attention_kernel version run_id model__name "
                  "environment__os environment__driver environment__git_diff environment__more "
                  "environment__libraries__numpy metrics__energy_source model__config__x "
                  "args__run_name")  # fmt: skip
    fields = dict.fromkeys(texts, every)
    fields |= dict.fromkeys(("writer__host", "environment__hostname"), SECRETS["host"])
    paths = words("args__output_dir args__save_dir args__val_data model__path")
    fields |= dict.fromkeys(paths, home)
    content = changed(result_of(RUN), **fields)
    content["remarks"] += [
        {"kind": "information", "text": text}
        for text in (every, home, SECRETS["bucket"], SECRETS["mail"])
    ]
    content["command"] += list(SECRETS.values())
    content["args"] |= {every: 1, "track": ["wandb"], "wandb_key": SECRETS["hex"]}
    content["environment"]["settings"] = {
        f"NCCL_{i}_X": value for i, value in enumerate(SECRETS.values())
    } | {"TORCH_PW": "hunter2hunter2", "NCCL_SOCKET_IFNAME": "eth-private", "NCCL_TOPO_FILE": home}
    content["environment"]["image"] = {"name": f"r.corp/{every}", "digest": every}
    content["environment"]["libraries"] |= {every: "1", "torch": "2.11.0"}
    content["model"]["ignored_keys"] = ["notes_of_jane"]
    content["model"]["config"] |= {"_name_or_path": home, "hub_token": SECRETS["token"],
                                   "architectures": [every], "notes_of_jane": 5,
                                   every: {"a": 1}, home: []}  # fmt: skip
    content["observed"]["paths"] = {every: every}
    content["observed"]["attention"]["forward"] += [SECRETS["bucket"]]
    times = dict.fromkeys(f"{x}_time_mean_s" for x in ("forward", "backward", "optimizer"))
    times |= {"step_time_mean_s": 1.0, "data_time_mean_s": 0.0, "peak_memory_gib": None}
    content["ranks"] = [{"rank": 0, "host": SECRETS["host"]} | times]
    (run / "result.json").write_text(json.dumps(content))
    saved = tmp_path / "s.json"
    assert compare.main([str(run), "--save", str(saved)]) == 0
    text = saved.read_text() + capsys.readouterr().out
    left = [name for name, secret in SECRETS.items() if secret.lower() in text.lower()]
    assert left == [] and not any(x in text for x in (str(tmp_path), "private", "jane", "corp"))
    cleaned = json.loads(saved.read_text())["settings"][0]["runs"][0]["result"]
    assert not {"--output-dir", "--save-dir", "--run-name"} & set(cleaned["command"])
    assert (cleaned["args"]["output_dir"], cleaned["args"]["run_name"]) == ("runs", None)
    assert cleaned["model"]["hash"] == content["model"]["hash"]
    assert cleaned["environment"]["libraries"]["torch"] == "2.11.0"
    # It is a repeat of the run that it was made from, and says so to the gate.
    both = [records_of(path)[0] for path in (run, saved)]
    assert identity(both[0]) == identity(both[1]) and both[0].conditions == both[1].conditions
    assert check.main(["--verify", str(saved)]) == 0


def test_a_data_file_is_told_apart_without_its_name(tmp_path):
    """By a digest of its path: files of one name in two places may hold other documents."""
    places = {"a": "/home/jane/corpus.bin", "b": "/home/jane/corpus.bin", "c": "/data/corpus.bin"}
    runs = {name: trial(tmp_path, name, args__data=data) for name, data in places.items()}
    assert id_of(runs["a"]) == id_of(runs["b"]) != id_of(runs["c"])
    assert compare.main(words(runs["a"], "--save", tmp_path / "s.json")) == 0
    text = (tmp_path / "s.json").read_text()
    assert "corpus" not in text and "jane" not in text
    assert id_of(tmp_path / "s.json") == id_of(runs["b"])


def test_a_meters_own_words_are_digests(tmp_path):
    content = result_of(ROOT / "tests/sample/plain")
    content |= {
        "entrypoint": "alice.py",
        "args": {"node": "gpu17", "user": "jdoe", "pw_of": "hunter2", "at": "10.20.30.40",
                 "optimizer": "adamw", "n_steps": 3, "optim.lr": 1},
    }  # fmt: skip
    (tmp_path / "result.json").write_text(json.dumps(content))
    (run,) = records_of(tmp_path)
    compare.main([str(tmp_path), "--save", str(tmp_path / "s.json")])
    text = (tmp_path / "s.json").read_text()
    (saved,) = records_of(tmp_path / "s.json")
    assert not any(word in text for word in ("gpu17", "jdoe", "alice", "hunter2", "10.20"))
    assert '"adamw"' in text
    assert identity(run) == identity(saved)


def test_first_layers_repeat_the_earlier_file_of_so_many(told, tmp_path):
    """Results of llama-3.1-8b-proxy.json, which had 8 layers, and of --layers 8 are of one setting."""
    config, name = "configs/llama-3.1-8b.json", "llama-3.1-8b-8-layers"
    place = "settings__0__runs__0__result__"
    facts = {"args__config": config, "args__layers": 8, "model__path": config, "model__name": name}
    content = changed(json.loads(FP8.read_text()), **{place + k: v for k, v in facts.items()})
    text, code = told(content)
    assert code == 0 and "of steps 0 to 3 of llama-8b-proxy" in text
    assert id_of(tmp_path / "told.json") == id_of(FP8)
    saved = tmp_path / "s.json"
    assert compare.main([str(tmp_path / "told.json"), "--save", str(saved)]) == 0
    result = only_run(json.loads(saved.read_text()))["result"]
    assert result["model"]["name"] == name and result["command"][-2:] == ["--layers", "8"]


# --- versions --------------------------------------------------------------------------------------


def trial(path: Path, name: str, changes="", **facts) -> Path:
    """The H200's run with changes, and with other facts by `part__field`; its place."""
    content = changed(result_of(RUN), changes, **facts)
    content["run_id"] = hashlib.sha256(name.encode()).hexdigest()[:12]
    (path / name).mkdir(parents=True)
    (path / name / "result.json").write_text(json.dumps(content))
    (path / name / "steps.jsonl").write_text((RUN / "steps.jsonl").read_text())
    return path / name


def id_of(path: Path) -> str:
    (record,) = records_of(path)
    return identity(record)


def test_flags_come_and_go(tmp_path, monkeypatch, output_of, refused):
    """A flag that is gone at its last default is nothing; at another value it is an unknown setting."""
    plain = trial(tmp_path, "plain")
    off = trial(tmp_path, "off", args__old_way=False)
    on = trial(tmp_path, "on", args__old_way=True)
    also_on = trial(tmp_path, "also_on", args__old_way=True)
    assert id_of(plain) != id_of(off)  # a fork's flag, of which nobody knows the default
    monkeypatch.setitem(flags.REMOVED, "old_way", False)
    assert id_of(plain) == id_of(off) != id_of(on) == id_of(also_on)
    monkeypatch.setitem(flags.REMOVED, "old_output", ...)  # which changed only what was written
    assert id_of(plain) == id_of(trial(tmp_path, "written", args__old_output=3))
    assert "| old-way " in output_of(compare.main, plain, on)
    message = "had --old-way True, and this version has no such flag; delete old_way from a copy"
    refused(helpers.train_main, message, "--from", on / "result.json", "--output-dir", tmp_path)
    # --verify says what it cannot compute any more.
    output_of(compare.main, on, "--save", tmp_path / "on.json")
    told = output_of(check.main, "--verify", tmp_path / "on.json")
    assert "figures: this version lacks old_way True" in told


@pytest.mark.parametrize(("changes", "answer"), cases("setting"))
def test_what_a_setting_is(changes, answer, tmp_path):
    first, second = changes.split(" | ") if " | " in changes else ("", changes)
    ids = id_of(trial(tmp_path, "a", first)), id_of(trial(tmp_path, "b", second))
    assert (ids[0] == ids[1]) is (answer == "same")


def test_small_numbers_of_a_result_are_numbers_to_from(tmp_path):
    """JSON writes 6e-05, which YAML 1.1 takes for a text."""
    run = trial(tmp_path, "a", args__lr=6e-05)
    assert parse_args(["--from", str(run / "result.json")], "train.py").lr == 6e-05


@pytest.mark.parametrize(("damage",), cases("damage"))
def test_damage_is_said_in_lines(damage, tmp_path, capsys):
    """By every reader, of a file of runs and of a result.json; and --save leaves its file as it was."""
    (tmp_path / "run").mkdir()
    base = shutil.copy(SHARED, tmp_path / "base.json")
    content = shared(damage.replace("BIG", str(10**400)))
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(content))
    (tmp_path / "run/result.json").write_text(json.dumps(only_run(content)["result"]))
    for argv in (words(saved), words(tmp_path / "run", "--output-dir", tmp_path / "out"),
                 words(RUN, "--baseline", saved), words(RUN, "--save", saved),
                 words(tmp_path / "run", "--baseline", base)):  # fmt: skip
        code = compare.main(argv)
        error = capsys.readouterr().err
        assert code in (0, 1, 5) or (code == 2 and error.count("\n") <= 2), error
    assert check.main(["--verify", str(saved)]) in (0, 1, 2)


def test_a_pipe_in_the_place_of_steps_does_not_block(tmp_path):
    run = trial(tmp_path, "a")
    (run / "steps.jsonl").unlink()
    os.mkfifo(run / "steps.jsonl")
    assert compare.main([str(run)]) == 0


# --- two writers -----------------------------------------------------------------------------------


FORKED = multiprocessing.get_context("fork")


def begun(target, arguments: list[tuple]) -> list:
    """Processes that are at work, each with its arguments."""
    writers = [FORKED.Process(target=target, args=args) for args in arguments]
    for writer in writers:
        writer.start()
    return writers


def save_one(number: int, folder: Path, barrier) -> None:
    barrier.wait()
    os._exit(compare.main([str(folder / f"r{number}"), "--save", str(folder / "all.json")]))


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    """Six processes save a setting each into one file; a user's file of a like name stays."""
    n = 6
    for i in range(n):
        trial(tmp_path, f"r{i}", args__grad_clip=1.0 + i)
    (tmp_path / "all.new").write_text("mine")
    barrier = FORKED.Barrier(n)
    writers = begun(save_one, [(i, tmp_path, barrier) for i in range(n)])
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0] * n
    assert len(json.loads((tmp_path / "all.json").read_text())["settings"]) == n
    assert (tmp_path / "all.new").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] == ".") == []


def write_again(path: Path, text: str) -> None:
    for _ in range(300):
        files.write_whole(path, text)


def test_a_reader_sees_one_of_two_writers_whole(tmp_path):
    path, texts, seen = tmp_path / "x.json", ["a" * 200_000, "b" * 100_000], set()
    files.write_whole(path, texts[0])
    writers = begun(write_again, [(path, text) for text in texts])
    while any(writer.is_alive() for writer in writers):
        seen.add(path.read_text())
    assert seen <= set(texts) and [p.name for p in tmp_path.iterdir()] == ["x.json"]


# --- saving ----------------------------------------------------------------------------------------


def test_saving_replaces_a_setting_and_keeps_its_tolerance_and_others(tmp_path, output_of):
    path = tmp_path / "base.json"
    a, b = trial(tmp_path, "a"), trial(tmp_path, "b", args__grad_clip=2.0)
    assert compare.main([str(a), str(b), "--save", str(path)]) == 0
    content = json.loads(path.read_text())
    assert len(content["settings"]) == 2
    content["settings"][0]["tolerance"] = 0.1
    path.write_text(json.dumps(content))
    first = content["settings"][0]["setting"]
    again = trial(tmp_path, "again", metrics__goodput=0.5)
    failed = trial(tmp_path, "failed", metrics__window_saves=1, args__lr=0.5)
    printed = output_of(compare.main, again, b, failed, "--save", path, code=5)
    assert printed.count("saved H200") == 2
    assert "left out gpt2-125m-bf16: saved in the window" in printed
    entries = {entry["setting"]: entry for entry in json.loads(path.read_text())["settings"]}
    assert len(entries) == 2 and entries[first]["tolerance"] == 0.1
    assert {len(entry["runs"]) for entry in entries.values()} == {1}
    assert any(e["runs"][0]["result"]["metrics"].get("goodput") == 0.5 for e in entries.values())


def test_what_else_is_in_a_file_stays(tmp_path, monkeypatch, refused):
    """A second entry of the setting, runs of another in an entry, the mode, the size; any other text."""
    a, b = trial(tmp_path, "a"), trial(tmp_path, "b", args__grad_clip=2.0)
    path = tmp_path / "s.json"
    assert compare.main(words(a, b, "--save", path)) == 0
    content = json.loads(path.read_text())
    first, second = content["settings"]
    mixed = first | {"runs": first["runs"] + second["runs"], "tolerance": 0.2}
    path.write_text(json.dumps(content | {"settings": [mixed, second | {"tolerance": 0.3}]}))
    path.chmod(0o600)
    (tmp_path / ".s.json.lock").write_text("mine")
    c = trial(tmp_path, "c", args__grad_clip=3.0)
    assert compare.main(words(c, "--save", path)) == 0
    entries = json.loads(path.read_text())["settings"]
    assert sorted((len(e["runs"]), e.get("tolerance")) for e in entries if "tolerance" in e) == [
        (1, 0.3), (2, 0.2)
    ]  # fmt: skip
    assert len(entries) == 3 and path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / ".s.json.lock").read_text() == "mine"
    before, notes = path.read_text(), tmp_path / "x.txt"
    monkeypatch.setattr("llm_train_bench.compare.save_runs.MOST_BYTES", 10_000)
    refused(compare.main, "would be larger than", a, "--save", path)
    notes.write_text("my notes")
    refused(compare.main, "x.txt: is not a file of runs", a, "--save", notes)
    assert (path.read_text(), notes.read_text()) == (before, "my notes")


def test_copies_of_runs_do_not_count_again(tmp_path, output_of):
    """Two copies of a file; and one of the baseline, among slower runs."""
    base, runs = tmp_path / "base.json", tmp_path / "runs"
    old = [trial(tmp_path, f"old{i}", metrics__goodput=i / 8) for i in range(2)]
    assert compare.main(words(old, "--save", base)) == 0
    copies = [shutil.copy(base, tmp_path / f"copy{i}.json") for i in range(2)]
    assert len(records_of(*copies)) == len(records_of(copies[0]))
    for i in range(3):
        slow = 1.1 + i / 1000
        rates = (f"metrics.tokens_per_sec{of}*={1 / slow}" for of in ("", "_per_gpu"))
        trial(runs, f"new{i}", " ".join((f"step_times_s.:*={slow}", *rates)))
    for copied in (False, True):
        if copied:
            shutil.copy(base, runs / "saved.json")
        printed = output_of(compare.main, runs, "--baseline", base, code=1)
        assert "new0 and 2 more" in printed or "gpt2-125m-bf16 and 2 more" in printed


def test_a_file_among_the_runs_is_not_saved_into_itself(tmp_path, refused):
    runs = tmp_path / "runs"
    path = runs / "base.json"
    old = trial(runs, "old", metrics__goodput=0.5)
    assert compare.main(words(runs, "--save", path)) == 0
    shutil.rmtree(old)
    trial(runs, "new", metrics__goodput=0.25)
    assert compare.main(words(runs, "--save", path)) == 0
    [entry] = json.loads(path.read_text())["settings"]
    assert [run["result"]["metrics"]["goodput"] for run in entry["runs"]] == [0.25]
    refused(compare.main, f"no file of runs besides {path}", path, "--save", path)
