"""Shared results: what --share leaves out, what --verify refuses, and what it must not refuse."""

import contextlib
import copy
import json
import math
from pathlib import Path

import jsonschema
import pytest

import check
import compare
from llm_train_bench.check import share, verify
from llm_train_bench.check.verify import Refused, fourth_tier, verify_file
from llm_train_bench.results.result_files import read_result
from tests.helpers import ROOT, python, trained, words

SHARED = ROOT / "results/h200-sxm/llm-train-bench/gpt2-125m-bf16-20261127.json"
FP8 = ROOT / "results/h200-sxm/llm-train-bench/llama-8b-proxy-fp8-20261127.json"
RUN = ROOT / "benchmarks/results/h200-20261127/gpt2-125m-bf16"


@pytest.fixture
def shared():
    return json.loads(SHARED.read_text())


@pytest.fixture
def verified(tmp_path):
    """The tier of a content, written to a file."""

    def tier(content) -> verify.Verified:
        path = tmp_path / "shared.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return verify_file(path)

    return tier


def set_at(content, path: str, value) -> None:
    """Set a dotted path below the first run: a value, or a function of the one there."""
    *parents, last = path.split(".")
    place = content["runs"][0]
    for key in parents:
        place = place[int(key) if isinstance(place, list) else key]
    last = int(last) if isinstance(place, list) else last
    place[last] = value(place[last]) if callable(value) else value


def times(factor):
    return lambda value: [factor * t for t in value] if isinstance(value, list) else factor * value


def refill(content) -> None:
    """Compute all figures again, as somebody would who has this program."""
    for run in content["runs"]:
        model = share.SharedRun.model_validate(run)
        run["result"] = share.canonical(model).model_dump(mode="json")


def scale_times(content, factor=0.5, energy=1.0) -> None:
    """The steps' times, and what follows from them; the host's clock stays."""
    run = content["runs"][0]
    for step in run["steps"]:
        for name in step:
            step[name] = (
                step[name] * factor if name.endswith("_time_s") and step[name] else step[name]
            )
    for use in run["result"]["devices"]:
        use["energy_j"] *= factor
    refill(content)


def remove_slow_steps(content) -> None:
    """Three steps of the window, and all that counts them."""
    run = content["runs"][0]
    window = [s for s in run["steps"] if s["phase"] == "measure"]
    slow = sorted(window[1:-1], key=lambda s: -s["step_time_s"])[:3]
    run["steps"] = [s for s in run["steps"] if s not in slow]
    for number, step in enumerate(run["steps"]):
        step["step"] = number
    run["result"]["args"]["n_steps"] = 17
    run["result"]["devices"][0]["energy_j"] *= 17 / 20
    refill(content)


def device_called(name, hardware=None, peak=None):
    """A device of another name, with all that follows."""

    def change(content) -> None:
        r = content["runs"][0]["result"]
        r["device"] |= {"name": name, "hardware": hardware or name}
        r["args"]["peak_tflops"] = peak
        with contextlib.suppress(Refused):
            refill(content)

    return change


def devices_reading(**readings):
    def change(content) -> None:
        content["runs"][0]["result"]["devices"][0] |= readings
        refill(content)

    return change


def few_steps(content, n=3, factor=0.8) -> None:
    run = content["runs"][0]
    run["steps"] = run["steps"][: 10 + n]
    run["result"]["args"]["n_steps"] = n
    run["result"]["devices"][0]["energy_j"] *= n / 20
    scale_times(content, factor)


def as_cpu(content) -> None:
    r = content["runs"][0]["result"]
    r["device"] |= {"type": "cpu", "name": "Invented CPU (avx2, 2 cores)", "memory_gib": None}
    r["devices"] = []
    r["environment"]["cpu"] = "Invented CPU (avx2, 2 cores)"
    refill(content)


def with_args(*also, **args):
    def change(content) -> None:
        content["runs"][0]["result"]["args"] |= args
        if also:
            refill(content)

    return change


def fast_first_step(content) -> None:
    step = content["runs"][0]["steps"][10]
    for name in (
        "step_time_s",
        "forward_time_s",
        "backward_time_s",
        "optimizer_time_s",
        "data_time_s",
    ):
        step[name] *= 1e-3
    window = sum(s["step_time_s"] for s in content["runs"][0]["steps"][10:])
    content["runs"][0]["result"]["devices"][0]["energy_j"] = 690.36 * window
    refill(content)


def refilled(change):
    return lambda content: (change(content), refill(content))


def a_loop(content, **more) -> None:
    r = content["runs"][0]["result"]
    r |= {"entrypoint": "train.py ", **more}


def drop_steps(content, which) -> None:
    run = content["runs"][0]
    run["steps"] = [s for s in run["steps"] if not which(s)]


def swap_model(content, name: str) -> None:
    set_at(content, "result.model.config", json.loads((ROOT / f"configs/{name}.json").read_text()))


def all_steps(content, name, value) -> None:
    for step in content["runs"][0]["steps"]:
        step[name] = value(step[name]) if callable(value) else value


def at(path, value):
    return lambda content: set_at(content, path, value)


R, M, D = "result", "result.metrics", "result.device"
# Each an inconsistent file, and words of the refusal.
ATTACKS = {
    "scaled times": (scale_times, "host's clock"),
    "times scaled by a tenth": (lambda c: scale_times(c, 0.9), "host's clock"),
    "a few scaled times": (lambda c: few_steps(c, 8, 0.85), "host's clock"),
    "tokens/s alone": (at(f"{M}.tokens_per_sec", times(1.1)), "metrics.tokens_per_sec"),
    "tokens/s per device alone": (at(f"{M}.tokens_per_sec_per_gpu", times(1.001)), "per_gpu"),
    "333,336 tokens/s": (at(f"{M}.tokens_per_sec_per_gpu", 333_336.0), "tokens_per_sec_per_gpu"),
    "another model's FLOPs": (at(f"{M}.flops_per_token_palm", times(12)), "flops_per_token_palm"),
    "MFU 563 %": (at(f"{M}.mfu", 5.63), "metrics.mfu"),
    "causal MFU above 1": (at(f"{M}.mfu_causal", 1.2), "mfu_causal"),
    "12 x the peak": (at(f"{M}.model_tflops_per_gpu", 989.4 * 12), "model_tflops_per_gpu"),
    "one wrong sum": (at(f"{M}.window_s", times(1.0001)), "metrics.window_s"),
    "one wrong quantile": (at(f"{M}.step_time_p90_s", times(0.99)), "step_time_p90_s"),
    "a narrower interval": (at(f"{M}.step_time_ci95_low_s", times(1.002)), "ci95_low"),
    "dropped steps": (lambda c: drop_steps(c, lambda s: s["step"] in (20, 21)), "missing"),
    "dropped and renumbered": (remove_slow_steps, "host's clock"),
    "dropped last steps": (lambda c: drop_steps(c, lambda s: s["step"] > 24), "measured ones"),
    "dropped warm-up": (lambda c: drop_steps(c, lambda s: s["step"] < 2), "missing"),
    "no steps": (lambda c: drop_steps(c, lambda s: True), "no measured step"),
    "steps in the warm-up": (at("steps.12.phase", "warmup"), "warm-up"),
    "steps of a profiler": (at("steps.12.phase", "profile"), "warm-up"),
    "another config": (lambda c: swap_model(c, "gpt2-1.5b"), "args.config|model"),
    "another config's name": (at(f"{R}.model.name", "gpt2-1.5b"), "args.config|model.name"),
    "another config in the flags": (at(f"{R}.args.config", "configs/gpt2-1.5b.json"), "args.config"),
    "another command": (at(f"{R}.command", ["train.py", "configs/gpt2-1.5b.json"]), "command"),
    "more parameters": (at(f"{R}.model.n_parameters", times(2)), "n_parameters"),
    "another hash": (at(f"{R}.model.hash", "0" * 16), "model.hash"),
    "another shape": (at(f"{R}.model.shape.hidden_size", 64), "model.shape"),
    "a longer sequence": (at(f"{R}.batch.seq_len", 2048), "batch"),
    "more tokens a step": (lambda c: all_steps(c, "tokens", times(2)), "tokens"),
    "a larger batch in the flags": (at(f"{R}.args.global_bsz", 256), "grad_acc_steps"),
    "accumulation that is no number": (at(f"{R}.args.grad_acc_steps", "x"), "args|grad"),
    "eager by its flags": (with_args(True, pt_compile=False), None),
    "another optimizer": (with_args(optimizer="sgd"), "command"),
    "a flag is missing": (lambda c: c["runs"][0]["result"]["args"].pop("amp"), "args.amp"),
    "a shorter step in the result": (at(f"{R}.step_times_s.3", times(0.5)), "step_times_s"),
    "a negative time": (at("steps.15.step_time_s", -0.2), "not above 0"),
    "parts longer than the step": (at("steps.15.forward_time_s", 0.5), "longer than the step"),
    "compiled in the window": (at("steps.15.compile_s", 0.1), "compiled in the window"),
    "saved in the window": (at("steps.15.saved", True), "saved"),
    "no time of day": (lambda c: all_steps(c, "at", 0.0), "clock|outside"),
    "a run of no length": (at(f"{R}.ended_at", "2026-11-27T00:26:00+00:00"), "start"),
    "a run of the future": (refilled(at(f"{R}.ended_at", "2096-01-01T00:00:00+00:00")), "future"),
    "a hundredth of the energy": (devices_reading(energy_j=33.05, average_power_w=6.9), "samples"),
    "negative energy": (devices_reading(energy_j=-3305.0, average_power_w=-690.0), "below 0"),
    "energy without power": (devices_reading(average_power_w=None), "without power"),
    "less energy": (at(f"{M}.energy_j", times(0.5)), "energy_j"),
    "tokens/J alone": (at(f"{M}.tokens_per_joule", times(2)), "tokens_per_joule"),
    "more power than the limit": (devices_reading(power_limit_w=500.0), "limit|power"),
    "a higher power limit": (devices_reading(power_limit_w=2000.0), "power limit"),
    "clocks out of order": (devices_reading(sm_clock_limit_mhz=50.0), "clocks"),
    "a shared card that is not": (at(f"{R}.devices.0.other_processes", 3), "device_shared"),
    "more memory than the device": (at(f"{M}.peak_allocated_gib", 200.0), "GiB"),
    "no memory": (refilled(at(f"{M}.peak_allocated_gib", None)), "missing"),
    "a device with more memory": (at(f"{D}.memory_gib", 288.0), "memory"),
    "negative memory": (at(f"{M}.memory_utilization", -1.0), "memory_utilization"),
    "a lower peak": (at(f"{D}.peak_bf16_tflops", 312.0), "peak_bf16_tflops"),
    "a source of a peak": (at(f"{D}.peak_source", "not --peak-tflops"), "peak_source"),
    "another device's name": (at(f"{D}.hardware", "A100 SXM 80GB"), "device.hardware"),
    "Cyrillic letters": (device_called("NVIDIA \u041d200", peak=1e6), "no driver"),
    "small letters": (device_called("nvidia h200", peak=1e6), "is like"),
    "two spaces": (device_called("NVIDIA  H200", peak=1e6), "is like"),
    "no name": (device_called("", "H200 SXM"), "no driver"),
    "an H200 as a slower card": (device_called("NVIDIA H100 80GB HBM3"), "GiB|hardware"),
    "a CPU as fast as a GPU": (as_cpu, "more than 2 cores"),
    "wrong losses": (lambda c: all_steps(c, "loss", lambda x: x + 0.02), "loss"),
    "wrong losses, and what follows": (refilled(lambda c: all_steps(c, "loss", lambda x: x + 0.02)),
                                       "the loss of step 0"),
    "wrong gradients": (lambda c: all_steps(c, "grad_norm", times(1.1)), "grad_norm"),
    "no losses": (lambda c: all_steps(c, "loss", None), "no finite loss"),
    "no last loss": (at("steps.29.loss", None), "no finite loss"),
    "unlike first loss": (at(f"{M}.first_loss", 9.0), "first_loss"),
    "more devices": (at(f"{D}.count", 8), "device|rank|times"),
    "a million million devices": (at(f"{D}.count", 10**12), "device.count"),
    "FP8 that did not run": (with_args(True, use_fp8=True, fp8_backend="torchao"), "kernels that ran"),
    "not a number": (at(f"{M}.mfu", math.nan), "no number"),
    "not a number, as a text": (at(f"{M}.mfu", "nan"), "valid number"),
    "a number as a text": (at(f"{M}.mfu", "0.47"), "valid number"),
    "true for one": (at(f"{D}.count", True), "valid integer"),
    "infinite": (at(f"{M}.tokens_per_sec", math.inf), "no number"),
    "a failed run": (at(f"{R}.status", "oom"), "status"),
    "an unknown flag": (at(f"{R}.args.speed", 11), "args.speed"),
    "an unknown fact": (at(f"{R}.environment.sponsor", "x"), "environment.sponsor"),
    "an unknown field": (at(f"{R}.score", 100), "score"),
    "a figure that nobody can compute": (at(f"{M}.goodput", 1.0), "goodput"),
    "a path": (at(f"{R}.command.1", "/home/me/x.json"), "command"),
    "a note": (at(f"{R}.notes", ["password=hunter2"]), "notes"),
    "a library with a path": (at(f"{R}.environment.libraries.torch", "/home/me/torch"), "libraries"),
    "libraries that are a text": (at(f"{R}.environment.libraries", "x"), "libraries"),
    "a name with a space": (a_loop, "entrypoint"),
    "a run twice": (lambda c: c["runs"].append(copy.deepcopy(c["runs"][0])), "twice"),
    "a first step of no time": (fast_first_step, "less than half of any other"),
    "a part of a GPU": (refilled(at(f"{D}.memory_gib", 43.0)), None),
    "kernels of FP8": (refilled(at(f"{R}.observed.matmuls", {"cublas bf16": 1, "x fp8": 2})),
                                   "kernels that ran"),
    "fewer than no kernels": (refilled(at(f"{R}.observed.matmuls", {"cublas bf16": -9.0})), "kernels"),
    "attention that was not asked for": (refilled(at(f"{R}.args.attention", "flash")), "cudnn ran"),
    "a loss below 0": (at("steps.25.loss", -50.0), "that no run has"),
    "a learning rate below 0": (at("steps.25.lr", -1.0), "that no run has"),
    "less reserved than allocated": (refilled(at(f"{M}.peak_reserved_gib", 1.0)), "than reserved"),
    "a part above 1": (devices_reading(throttled={"power cap": 5.0}), "above 1"),
    "a fire": (devices_reading(temperature_max_c=5000.0), "150 C"),
    "reasons with a path": (devices_reading(throttled={"/home/x <script>": 0.5}), None),
    "a huge config": (at(f"{R}.model.config.more", {str(i): i for i in range(3000)}), "2,000 keys"),
    "a huge batch": (at(f"{R}.args.bsz", "auto"), "bsz|batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_an_inconsistent_file_is_refused(name, shared, verified):
    change, words_of_it = ATTACKS[name]
    change(shared)
    if words_of_it is None:  # it is another setting or device, or the text is gone
        v = verified(shared)
        text = v.shared.model_dump_json()
        assert (v.what != verify_file(SHARED).what and v.tier < 4) or "/home" not in text
        return
    with pytest.raises((Refused, share.UsageError)) as refusal:
        verified(shared)
    assert any(word in str(refusal.value) for word in words_of_it.split("|")), refusal.value


def device_reading(**readings):
    return lambda c: c["runs"][0]["result"]["devices"][0].update(readings)


E = f"{R}.environment"
# Each an honest file of another machine, which --share would write.
HONEST = {
    **{f"torch {v}": at(f"{E}.libraries.torch", v) for v in
       ("2.11.0", "2.11.0+cu130", "2.12.1", "2.13.0+rocm7.1", "2.15.0.dev20261101", "2.14.1")},
    **{f"driver {v}": at(f"{E}.driver", v) for v in ("535.104.05", "610.12", "6.12.12", None)},
    **{f"python {v}": at(f"{E}.python", v) for v in ("3.11.7", "3.12.0", "3.13.1", "3.14.0rc2")},
    **{f"run name {v}": at(f"{R}.run_name", v) for v in
       ("b200", "пример", "実行", "run with spaces", "a" * 200, "émile", "", "../x", "train")},
    **{f"system {v}": at(f"{E}.os", v) for v in
       ("Linux-5.4.0-x86_64-with-glibc2.31", "Linux-6.1-aarch64-with-glibc2.36", "macOS-15.1-arm64")},
    **{f"image {v}": at(f"{E}.image", v) for v in
       ({"name": "registry.example/x:1", "digest": "sha256:" + "a" * 64}, None)},
    **{f"CPU {v}": at(f"{E}.cpu", v) for v in
       ("AMD EPYC 9654 (avx2, 192 cores)", "Neoverse-V2 (sve2)", "Intel(R) Xeon(R) CPU @ 2.80GHz")},
    "CUDA 12": at(f"{E}.cuda", "12.8"), "no Triton": at(f"{E}.libraries.triton", None),
    "a setting": at(f"{E}.settings", {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0"}),
    "a dirty tree": at(f"{E}.git_dirty", True), "no revision": at(f"{E}.git_sha", None),
    "a price": at(f"{R}.args.usd_per_hour", 2.5), "no peak power": device_reading(peak_power_w=None),
    "no samples": device_reading(n_samples=0, sampled_power_mean_w=None),
    "hotter": device_reading(temperature_max_c=83.0),
    "a note": at(f"{R}.notes", ["it rained on node 7"]),
    "no energy counter": device_reading(energy_j=None, average_power_w=None),
    "another version": at(f"{R}.version", "0.3.1"),
    "numa": at(f"{E}.numa", {"nodes": 2, "balancing": False}),
    "workers": at(f"{R}.args.n_workers", 2), "quiet": at(f"{R}.args.quiet", True),
    "another directory": at(f"{R}.args.output_dir", "/scratch/me"),
    "tracked": at(f"{R}.args.track", ["wandb"]),
    "a time zone": lambda c: (set_at(c, f"{R}.ended_at", "2026-11-27T02:30:26+02:00"),
                              set_at(c, f"{R}.started_at", lambda t: t.replace("+00:00", "Z"))),
    "another attention kernel": at(f"{R}.attention_kernel", "flash"),
    "no compile time": at(f"{M}.compile_s", None),
    "host jitter": lambda c: set_at(c, "steps.20.at", lambda t: t + 0.05),
    "a config with a name": at(f"{R}.model.config._name_or_path", "/home/me/gpt2"),
    "a config with an unknown key": at(f"{R}.model.config.torch_dtype", "bfloat16"),
    "another process's memory": at(f"{M}.peak_reserved_gib", 60.0),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_variation_is_accepted(name, shared, verified):
    HONEST[name](shared)
    refill(shared)
    assert verified(shared).tier == 3


def test_there_are_as_many_as_promised():
    assert len(ATTACKS) >= 40 and len(HONEST) >= 40


def test_fp8_losses_have_a_wider_band_than_bf16(verified):
    """The same file that says bf16 is refused: its losses are not those of bf16."""
    assert verify_file(FP8).tier == 3
    content = json.loads(FP8.read_text())
    content["runs"][0]["steps"][3]["loss"] += 0.02
    with pytest.raises(Refused, match="the loss of step 3"):
        verified(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "not usable JSON"), ("[]", "no shared result"), ('{"format": 7}', "no shared result"),
     ("[" * 100_000, "nested|JSON"), ('{"a": ' * 70 + "1" + "}" * 70, "nested"),
     (" " * (share.MOST_BYTES + 1), "larger than"), ("\x00\xff", "JSON"),
     ('{"format": "llm-train-bench shared result", "format": 1}', "stands twice"),
     (json.dumps({"format": share.FORMAT, "schema_version": True, "runs": []}), "schema_version"),
     (json.dumps({"format": share.FORMAT, "schema_version": 2, "runs": []}), "schema_version"),
     (json.dumps({"format": share.FORMAT, "schema_version": 1,
                  "runs": [{"steps": [{"a": 1}] * 9999}]}), "step"),
     (json.dumps({"format": share.FORMAT, "schema_version": 1, "runs": [{}] * 21}), "runs")],
)  # fmt: skip
def test_what_is_no_such_file_exits_with_2(text, message, tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(text, encoding="latin-1")
    assert check.main(["--verify", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and any(word in error for word in message.split("|"))


def test_tiers_in_words_and_exit_codes(tmp_path, capsys, shared):
    assert check.main(["--verify", str(SHARED)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("tier 3, plausible") and "not tier 4: nobody else" in out
    set_at(shared, f"{M}.mfu", 5.63)
    (tmp_path / "x.json").write_text(json.dumps(shared))
    assert check.main(["--verify", str(tmp_path / "x.json")]) == 1
    assert capsys.readouterr().out.startswith("refused: metrics.mfu is 5.63")
    assert check.main(["--verify", str(SHARED), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tier"] == 3 and told["workload"] == "gpt2-125m" and told["known_hardware"]


def test_verification_needs_no_torch(tmp_path):
    code = f"""
import sys
sys.modules["torch"] = None
import check
sys.exit(check.main(["--verify", {str(SHARED)!r}]))
"""
    assert "tier 3" in python(["-c", code]).stdout


def another_run(content, factor=1.01) -> dict:
    """An honest run of the same: other times, each with noise of its own, and what follows from them."""
    other = copy.deepcopy(content)
    run = other["runs"][0]
    r, late = run["result"], 7.0
    for i, step in enumerate(run["steps"]):
        change = factor * (1 + 0.003 * math.sin(7 * i + factor))
        late += step["step_time_s"] * (change - 1)
        step["at"] += late
        for name in ("step_time_s", "forward_time_s", "backward_time_s", "optimizer_time_s"):
            step[name] *= change
    r["devices"][0]["energy_j"] *= factor
    r["lineage"]["id"] = f"{int(1e6 * factor):08x}"
    r["started_at"], r["ended_at"] = "2026-11-27T00:24:59+00:00", "2026-11-27T01:24:59+00:00"
    refill(other)
    return other


def test_another_submitter_reproduces_it_but_a_copy_or_oneself_does_not(shared, verified):
    one, same, slower = (verified(c) for c in (
        shared, another_run(shared), another_run(shared, 1.07)))  # fmt: skip
    assert (same.tier, slower.tier) == (3, 3)
    reproduced, said = fourth_tier(one, "ann", [("bob", same)])
    assert reproduced.tier == 4 and said == "reproduced by bob"
    assert fourth_tier(one, "ann", [("ann", same), ("ANN", same)])[0].tier == 3
    tier, said = fourth_tier(one, "ann", [("bob", slower)])
    assert tier.tier == 3 and said == "bob has 93% of its speed"
    scaled = copy.deepcopy(shared)
    scaled["runs"][0]["result"]["lineage"]["id"] = "0123456789"
    scaled["runs"][0]["result"]["started_at"] = "2026-11-27T00:24:58+00:00"
    refill(scaled)
    for copied in (shared, scaled):
        tier, said = fourth_tier(one, "ann", [("bob", verified(copied))])
        assert tier.tier == 3 and "is a copy" in said


def same_start(copied, original) -> None:
    set_at(copied, f"{R}.started_at", original["runs"][0]["result"]["started_at"])


def same_clock(copied, original) -> None:
    for step, was in zip(copied["runs"][0]["steps"], original["runs"][0]["steps"], strict=True):
        step["at"] = was["at"]


def same_times(copied, original, factor=1.02) -> None:
    for step, was in zip(copied["runs"][0]["steps"], original["runs"][0]["steps"], strict=True):
        step["step_time_s"] = factor * was["step_time_s"]


def same_times_a_step_later(copied, original) -> None:
    steps, was = (c["runs"][0]["steps"] for c in (copied, original))
    for step, before in zip(steps[1:], was, strict=False):
        step["step_time_s"] = before["step_time_s"] * (1 + 3e-5 * (step["step"] % 2))


@pytest.mark.parametrize(
    "alike", [same_start, same_clock, same_times, same_times_a_step_later, None]
)
def test_one_trait_gives_a_copy_away(alike, shared):
    """All others were changed; two runs that share none are no copy."""
    other = another_run(shared)
    if alike:
        alike(other, shared)
    one, two = (share.SharedRun.model_validate(c["runs"][0]) for c in (shared, other))
    assert verify.is_copy(one, two) is bool(alike)


def test_repeats_are_one_file_and_others_are_refused(shared, verified):
    both = shared["runs"] + another_run(shared)["runs"]
    v = verified({**shared, "runs": both})
    assert v.tier == 3 and len(v.rates) == 2 and min(v.rates) < v.rate < max(v.rates)
    other = json.loads(FP8.read_text())["runs"]
    with pytest.raises(Refused, match="not repeats of one setting"):
        verified({**shared, "runs": shared["runs"] + other})


SECRETS = {
    "host": "gpu-node-17.corp.example", "user": "j.doe-private", "token": "hf_" + "Q" * 30,
    "github": "ghp_" + "Z" * 36, "password": "hunter2hunter2", "mail": "jane.doe@corp.example",
    "address": "10.20.30.40", "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    "project": "secret-project-path", "hex": "deadbeef" * 5, "google": "AIza" + "S" * 35,
    "hook": "hooks.example/T00/B00/x", "bucket": "s3://acme-private/x", "v6": "fe80::a1b2:c3d4",
}  # fmt: skip


def test_nothing_private_leaves_the_machine(tmp_path, monkeypatch, capsys):
    """Planted in every text of a result, in new keys, and where runs really keep such texts."""
    run = tmp_path / SECRETS["project"] / "run"
    run.mkdir(parents=True)
    (run / "steps.jsonl").write_text((RUN / "steps.jsonl").read_text())
    content = json.loads((RUN / "result.json").read_text())
    every = " ".join(SECRETS.values())
    home = f"/home/{SECRETS['user']}/{SECRETS['project']}"
    content["writer"]["host"] = content["environment"]["hostname"] = SECRETS["host"]
    for name in ("run_name", "linear", "attention_kernel", "version"):
        content[name] = every
    content["lineage"]["name"] = content["model"]["name"] = every
    content["notes"] = [every]
    content["command"] += list(SECRETS.values())
    content["args"] |= {"output_dir": home, "save_dir": home, "run_name": every, "track": ["wandb"]}
    content["environment"]["settings"] = {
        f"NCCL_{i}_X": value for i, value in enumerate(SECRETS.values())
    } | {"TORCH_PW": "hunter2hunter2", "NCCL_SOCKET_IFNAME": "eth-private", "NCCL_TOPO_FILE": home}
    content["environment"] |= {"image": {"name": every, "digest": every}, "os": every, "driver": every,
                               "git_diff": every, "more": every}  # fmt: skip
    content["environment"]["libraries"] |= {every: "1", "torch": "2.11.0", "numpy": every}
    content["model"] |= {"path": f"{home}/config.json", "ignored_keys": [every]}
    content["model"]["config"] |= {"_name_or_path": home, "hub_token": SECRETS["token"], "x": every,
                                   "architectures": [every]}  # fmt: skip
    content["observed"]["fallbacks"] = [home, SECRETS["bucket"], SECRETS["mail"]]
    content["observed"]["paths"] = {every: every}
    content["metrics"]["energy_source"] = every
    content["ranks"] = [{"rank": 0, "host": SECRETS["host"], "step_time_mean_s": 1.0,
        "data_time_mean_s": 0.0, "forward_time_mean_s": None, "backward_time_mean_s": None,
        "optimizer_time_mean_s": None, "peak_memory_gib": None}]  # fmt: skip
    (run / "result.json").write_text(json.dumps(content))
    assert compare.main([str(run), "--share", str(tmp_path / "s.json")]) == 0
    said, text = capsys.readouterr().out, (tmp_path / "s.json").read_text()
    left = [name for name, secret in SECRETS.items() if secret.lower() in text.lower()]
    assert left == [] and str(tmp_path) not in text and "private" not in text
    for name in ("writer.host", "environment.hostname", "notes", "command", "args.save_dir"):
        assert name in said, said
    cleaned = json.loads(text)["runs"][0]["result"]
    assert cleaned["model"]["hash"] == content["model"]["hash"]
    assert cleaned["environment"]["libraries"]["torch"] == "2.11.0"
    assert verify_file(tmp_path / "s.json").tier == 3


def test_a_round_trip_from_a_run_to_the_page(tmp_path, capsys):
    """A run here is shared, verified (tier 2: nothing bounds a CPU's speed), and stands on the page."""
    trained(tmp_path / "runs", words("--from configs/workloads/v1/gpt2-tiny-fp32.yaml --n-steps 6"),
            "--warmup-steps 2 --run-name here")  # fmt: skip
    folder = tmp_path / "results/cpu/ann"
    folder.mkdir(parents=True)
    assert compare.main([str(tmp_path / "runs/here"), "--share", str(folder / "a.json")]) == 0
    v = verify_file(folder / "a.json")
    assert (v.tier, v.name, v.number_format) == (2, "gpt2-tiny", "fp32")
    assert "not listed" in v.why_not_higher
    assert v.rate == read_result(tmp_path / "runs/here/result.json").metrics.tokens_per_sec_per_gpu
    (folder / "b.json").write_text("{}")
    capsys.readouterr()
    argv = ["--site", str(tmp_path / "results"), "--output-dir", str(tmp_path / "site")]
    assert compare.main(argv) == 1  # b.json was refused
    assert "b.json: is no shared result" in capsys.readouterr().err
    page = (tmp_path / "site/index.html").read_text()
    assert '"model":"gpt2-tiny"' in page and '"submitter":"ann"' in page


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["nothing"], "cannot be read"), ([str(ROOT / "tests/sample")], "cannot be read")],
)
def test_what_cannot_be_shared(argv, message, tmp_path, capsys):
    assert compare.main([*argv, "--share", str(tmp_path / "x.json")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "x.json").exists()


def test_a_run_without_steps_or_that_failed_is_not_shared(tmp_path, capsys):
    content = json.loads((RUN / "result.json").read_text())
    changes = {"steps.jsonl is not there": {}, "status is oom": {"status": "oom"},
               "disturbed (saved in the window": {"metrics": content["metrics"] | {"window_saves": 1}},
               "loss is not finite": {"metrics": content["metrics"] | {"final_loss": None}}}  # fmt: skip
    for message, changed in changes.items():
        (tmp_path / "result.json").write_text(json.dumps(content | changed))
        assert compare.main([str(tmp_path), "--share", str(tmp_path / "x.json")]) == 2
        assert message in capsys.readouterr().err


def test_the_schema_on_file_is_that_of_the_program():
    """Other programs can check a file by results/schema-v1.json; `make docs` writes it."""
    written = json.loads((ROOT / "results/schema-v1.json").read_text())
    assert written == share.SharedFile.model_json_schema()
    jsonschema.validate(json.loads(SHARED.read_text()), written)


def test_every_file_of_the_table_verifies():
    files = list(Path(ROOT / "results").glob("*/*/*.json"))
    assert len(files) >= 6
    for path in files:
        v = verify_file(path)
        assert v.tier >= 1 and path.parent.parent.name == share.folder_of(
            v.shared.result.device.hardware
        )
