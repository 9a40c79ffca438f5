"""What a setting is, how it is named, which may be compared, and which is faster. Needs no torch.

A setting is a model, a number of devices, a script and its flags. Software, environment and the machine's
state are conditions of a run: they are no part of the identity, and are shown where they differ.
"""

import collections
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from llm_train_bench.base.redaction import shown_text
from llm_train_bench.base.tables import grouped
from llm_train_bench.compare.records import Record
from llm_train_bench.compare.shareable import public_device, public_name, public_value
from llm_train_bench.formulas.time_statistics import Mean, chance_of, difference, mean_of, student_t
from llm_train_bench.results.remarks import REFERENCE_KERNELS
from llm_train_bench.results.schema import METER_LENGTH, Result
from llm_train_bench.settings.flags import (
    LENGTH,
    OUTPUT,
    USUAL_STAGES,
    Script,
    differing,
    of_kind,
    present_flags,
    usual_values,
    without_meaning,
)

# What may differ between repeats of one setting.
NOT_THE_SETTING = {"seed"}
# Runs of one setting differ by this much.
RUNS_DIFFER = 0.01
# With fewer runs of a setting nobody knows how much runs differ.
RUNS_FOR_A_VERDICT = 3
# The chance that any verdict of a whole table is false.
TABLE_ERROR = 0.05


def settings_of(r: Result) -> dict[str, Any]:
    """A run's script, global batch and flags, as this version has them; without flags that do nothing.

    A loop of others has the arguments of its Meter, which may have the names of our flags.
    """
    if r.ours:
        settings = meaningful(present_flags(r.args))
        if r.entrypoint == Script.PP:
            settings["pp"] = settings.get("pp") or USUAL_STAGES
    else:
        known = [(k, v) for k, v in r.args.items() if k not in NOT_THE_SETTING.union(METER_LENGTH)]
        settings = {k: tuple(v) if isinstance(v, list) else v for k, v in known}
    return settings | {"global_batch": r.batch.global_batch, "script": r.entrypoint}


def meaningful(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a script's flags that change what is learnt or how fast."""
    ignored = of_kind(OUTPUT, LENGTH) | without_meaning(flags) | NOT_THE_SETTING
    return {name: value for name, value in flags.items() if name not in ignored}


def changed_settings(r: Record) -> dict[str, Any]:
    """Its settings that are not at their defaults; a Meter's arguments have none."""
    default = usual_values() if r.result is None or r.result.ours else {}
    settings = r.arguments or {}
    return {k: v for k, v in settings.items() if k not in default or v != default[k]}


def identity(r: Record) -> str:
    """Equal for repeats of one setting; a run with unknown flags is a setting by itself."""
    if r.arguments is None:
        return f"{r.path} {r.label}"
    settings = {public_name(k): public_value(k, v) for k, v in changed_settings(r).items()}
    settings["seq_len"] = r.seq_len  # whether it was given, or is the model's
    # 2 and 2.0 are one setting; a float holds whole numbers up to 2**53.
    settings |= {k: float(v) for k, v in settings.items() if type(v) is int and abs(v) < 2**53}
    machine = public_device(r.hardware or ""), r.n_gpus
    return json.dumps([r.suite, r.model_hash or r.model, *machine, settings], sort_keys=True)


def repeats(records: Iterable[Record]) -> list[list[Record]]:
    """Runs of one setting under the same conditions, in order."""
    groups = grouped(records, lambda r: (identity(r), frozenset(r.conditions.items())))
    return list(groups.values())


def setting_name(facts: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """In words, those of the facts that differ from what is `usual`."""
    return ", ".join(_word(k, v) for k, v in facts.items() if k not in usual or usual[k] != v)


def name_by_itself(r: Record) -> str:
    """A setting in words by itself: device, model, script, and what differs from the defaults."""
    return f"{r.hardware} x {r.n_gpus}: {r.model or 'unknown model'}, {changes_in_words(r)}"


def changes_in_words(r: Record) -> str:
    """Its script and length, and the settings that differ from the defaults by themselves."""
    settings = changed_settings(r)
    script = str(settings.pop("script", ""))
    length = settings.pop("seq_len", r.seq_len)
    if r.result and r.result.ours:
        settings.pop("global_batch", None)
    words = script, f"T {length}" if length else "", setting_name(settings, {})
    return ", ".join(filter(None, words))


def name_settings(members: Sequence[Record]) -> str:
    """Name each setting by what differs in its group, in place; without flags, by its file.

    The answer is what all have in common, in words: machine, script, flags that are not at a default.
    """
    facts = [{} if r.arguments is None else _facts(r) for r in members]
    known = [f for f in facts if f]
    keys = dict.fromkeys(key for f in known for key in f)
    metered = {f["script"] not in set(Script) for f in known if f.get("script")}
    if len(metered) > 1:  # a Meter knows few of our settings, and its loop has others
        keys = [key for key in keys if all(key in f for f in known)]
    default = usual_values()  # what a flag is that depends on another, which is off
    differ = [key for key in keys if len({str(f.get(key, default.get(key))) for f in known}) > 1]
    for record, values in zip(members, facts, strict=True):
        words = setting_name({key: values[key] for key in differ if key in values}, {})
        record.setting = words or (record.settings if values else "") or record.label
    for same in [x for x in grouped(members, lambda r: r.setting).values() if x[1:]]:
        labels = collections.Counter(record.label for record in same)
        for i, record in enumerate(same):  # differences that no flag tells
            which = record.label if labels[record.label] == 1 else f"{record.label} #{i + 1}"
            record.setting = f"{record.setting} ({which})"
    if len(known) < len(facts):
        return ""
    conditions = {key for r in members for key in r.conditions} - default.keys()
    hidden = {*differ, *conditions, "model", "data", "seq_len"}
    shared = {k: v for k, v in known[0].items() if k in keys and k not in hidden}
    return setting_name(shared, default)


def _facts(r: Record) -> dict[str, Any]:
    """What a setting is made of; the flags last, since machines differ more visibly."""
    flags = dict(r.arguments or {})
    if flags.get("grad_acc_steps") is not None and flags.get("bsz") is not None:
        flags.pop("global_batch", None)  # follows from these and the GPUs
    # A flag may be `auto`, and the conditions say what that chose.
    chosen = {key: value for key, value in r.conditions.items() if key in flags}
    machine = {"": r.hardware, "devices": r.n_gpus, "model": r.model}
    return machine | r.conditions | flags | chosen


def _word(key: str, value: Any) -> str:
    names = {"sac_freq": "sac", "pt_compile": "compiled", "use_fp8": "FP8", "script": ""}
    word = names.get(key, key.replace("_", "-"))
    if isinstance(value, bool) or value in (None, ()):
        return word if value else {"pt_compile": "eager"}.get(key, f"no {word}")
    values = value if isinstance(value, tuple) else (value,)
    text = " ".join(shown_text(str(each)) for each in values).removesuffix(".py")
    return f"{word} {text}".strip()


def plainest(members: Sequence[Record]) -> Record:
    """The setting with the fewest flags that are not at their defaults; the first of those."""
    default = usual_values()
    return min(members, key=lambda r: sum(key in default for key in changed_settings(r)))


# --- which may be compared, and which is faster ---------------------------------------------------


def unlike(a: Record, b: Record, identical: bool) -> list[str]:
    """Why b cannot be compared with a: another model, another training, another way to count."""
    why = []
    if a.suite != b.suite and (_by_reference_kernels(a) or _by_reference_kernels(b)):
        why.append(f"{REFERENCE_KERNELS}: they say nothing of other trainers' speed")
    if a.model_hash and b.model_hash and a.model_hash != b.model_hash:
        why.append("another model under the same name")
    if a.hardware == b.hardware and unlike_limits(a.power_limit_w, b.power_limit_w):
        why.append(f"power limit {a.power_limit_w:.0f} / {b.power_limit_w:.0f} W")
    left, right = a.hyperparameters or {}, b.hyperparameters or {}
    if identical and a.arguments and b.arguments:
        left, right = a.arguments, b.arguments
    names = differing(left, right)
    if not identical:
        # Settings may differ to suit each machine; what is learnt may not.
        names = [n for n in names if n not in ("global_batch", "seed", "data")]
    for n in names:
        pair = [f"{v:g}" if type(v) is float else shown_text(str(v)) for v in (left[n], right[n])]
        why.append(f"{n} {' / '.join(pair)}")
    if identical and not (a.arguments and b.arguments) and a.settings != b.settings:
        why.append(f"settings {a.settings} / {b.settings}")
    return why


def _by_reference_kernels(r: Record) -> bool:
    """Whether a run of ours on a GPU had layers that others compute by kernels of their own."""
    told = any(text.startswith(REFERENCE_KERNELS) for text in r.texts("information"))
    return told and r.result is not None and r.result.device.type != "cpu"


def unlike_limits(a: float | None, b: float | None) -> bool:
    """Whether two power limits [W] of one kind of device differ, by more than their rounding."""
    return bool(a and b and abs(a / b - 1) > 0.01)


Answer = Literal["faster", "slower", "uncertain"]


def settle(pairs: Sequence[tuple[Mean, Mean]], error: float = TABLE_ERROR) -> list[Answer]:
    """Which rate of each pair is surely higher: any false answer among all has at most this chance.

    Welch's test with Holm's correction (1979): the pair that is least likely to be noise comes first, and
    needs the most.
    """
    answers: list[Answer] = ["uncertain"] * len(pairs)
    gaps = [difference(a, b) or (0.0, 0.0, 1.0) for a, b in pairs]
    chances = [chance_of(gap / wide, n) if wide else float(gap == 0) for gap, wide, n in gaps]
    for rank, i in enumerate(sorted(range(len(pairs)), key=chances.__getitem__)):
        if chances[i] > error / (len(pairs) - rank):
            break
        a, b = pairs[i]
        answers[i] = "faster" if a.value > b.value else "slower"
    return answers


def ratio_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of a mean rate over another (Welch); None with fewer than two runs on a side."""
    ratio = statistics.fmean(a) / statistics.fmean(b)
    gap = difference(mean_of(a), mean_of([ratio * rate for rate in b]))
    if gap is None or min(len(a), len(b)) < 2:
        return None
    _, error, degrees = gap
    wide = student_t(0.975, degrees) * error / statistics.fmean(b)
    return ratio - wide, ratio + wide
