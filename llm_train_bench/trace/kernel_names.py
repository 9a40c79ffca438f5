"""Classes of GPU kernels and CPU operators, read off their names. Needs no torch.

kernel_names.toml has the patterns.
"""

import functools
import re
import tomllib
from pathlib import Path

MATMUL, ATTENTION, COMMUNICATION, COPIES = "matmul", "attention", "communication", "copies"
LOSS, OPTIMIZER, ELEMENTWISE = "loss", "optimizer", "elementwise"

# Functions that say nothing by themselves: their template arguments name what they compute.
_WRAPPERS = re.compile(
    r"device_kernel|kernel\d*|kentry|run_global|multi_tensor_apply_kernel|cunn_softmax\w*"
    r"|\w*(elementwise|reduce|for_each)_kernel\w*|fused_moe_kernel\w*",
    re.IGNORECASE,
)
LONGEST = 4096  # letters of a name that are looked at
_COPY = re.compile(r"mem(cpy|set)", re.IGNORECASE)
_NO_PART = re.compile(
    r"\(anonymous namespace\)::|<unnamed>::| \[clone [^]]*\]|\.kd$|decltype\(auto\) "
)
# By what they are for: rows of a class and its patterns.
_PATTERNS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def named(table: str, name: str) -> str | None:
    """What the first pattern of a table that finds something in the name stands for."""
    rows = _PATTERNS[table]
    found = (kind for kind, *texts in rows if re.search("|".join(texts), name, re.IGNORECASE))
    return next(found, "") or None


@functools.cache
def kernel_class(name: str) -> str:
    """The class of a GPU kernel, memory copy or memset: by its function's own name, if that tells it."""
    scope, own, arguments = name_parts(name[:LONGEST])
    kind = named("kernels", own) or named("namespaces", scope + own)
    if kind is None and _WRAPPERS.fullmatch(own):
        kind = named("kernels", arguments)
    return kind or ELEMENTWISE


@functools.cache
def name_parts(name: str) -> tuple[str, str, str]:
    """A kernel's namespaces, its function's own name, and its template arguments.

    Of a demangled or a mangled C++ name; any other name is the function's own.
    """
    if name.startswith("_ZN"):  # <length><name> ..., then I and the template arguments
        names, at = [], 3
        while length := re.compile(r"\d+").match(name, at):
            at = length.end() + int(length[0])
            names.append(name[length.end() : at])
        return "::".join([*names[:-1], ""]), names[-1] if names else name, name[at:]
    if by_cute := re.fullmatch(r"kernel_cutlass_(.*?)_object_at_(.*)", name):
        return "", by_cute[1], by_cute[2]
    name = _NO_PART.sub("", name)
    if _COPY.match(name) or not re.search(r"[<(]|::", name):
        return "", name, ""
    # What no bracket holds, open brackets, and the begin and end of the last template arguments.
    outside, open_, begin, end = "", "", 0, 0
    for at, letter in enumerate(name):
        if letter == "(" and not open_:
            break  # the parameters
        if letter in "<(":
            begin = begin if open_ else at
            open_ += letter
        elif open_ and letter == (">" if open_[-1] == "<" else ")"):
            open_, end = open_[:-1], at
        elif not open_:
            outside += letter
    scope, _, own = outside.strip().rpartition(" ")[2].rpartition("::")
    return f"{scope}::", own, name[begin : None if open_ else end]


@functools.cache
def operator_class(name: str) -> str | None:
    """The class of a CPU operator's own time; None for what only looks at tensors or calls others."""
    return named("operators", name)


def collective_kind(said: object, name: str) -> str:
    """The kind of a collective, by what its `Collective name` says or by its kernel's or range's name."""
    kinds = (named("collectives", text) for text in (str(said or ""), name))
    return next(filter(None, kinds), "other")


def matmul_format(name: str, input_types: list[str] | None = None) -> str | None:
    """The number format of a matmul's inputs, from the kernel's name, else from recorded types; or None.

    An operator's inputs may be wider than the matmul's: a sum to add to, or weights before a cast.
    """
    types = " ".join(t for t in input_types or [] if isinstance(t, str))
    if of_triton := re.search(
        r"matmul_ogs_[A-Z]+_[^_]+?x([^_]+?)x", name[:LONGEST]
    ):  # output, input, weight
        name = of_triton[1]
    else:
        _, own, arguments = name_parts(name[:LONGEST])
        name = f"{own} {arguments}"
    return named("formats", name) or named("formats", types)
