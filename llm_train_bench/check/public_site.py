"""The page of all shared results: one HTML file that needs no other. Needs no torch."""

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llm_train_bench import __version__
from llm_train_bench.base.errors import UsageError, printable_data
from llm_train_bench.base.files import write_whole
from llm_train_bench.base.hardware import Hardware, device_called, devices
from llm_train_bench.check.references import PUBLISHED
from llm_train_bench.check.verify import TIERS, Verified, verified_files
from llm_train_bench.compare.report import page_of
from llm_train_bench.model.json_keys import parse_json
from llm_train_bench.settings.flags import SPEED, Args, defaults, flag_of, of_kind

# Flags of speed that are no part of a layout: the number format, and what depends on memory alone.
NOT_LAYOUT = {"amp", "tf32", "use_fp8", "fp8_backend", "fp8_recipe", "bsz", "grad_acc_steps"}
TEMPLATE = Path(__file__).parent / "site_page.html"


def write_site(folder: Path, directory: Path, say: Callable[[str], None]) -> int:
    """Write directory/index.html; 0, or 1 if a file of the folder was refused."""
    if not folder.is_dir():
        raise UsageError(f"--site {folder}: no such folder")
    refused: list[str] = []
    files = verified_files(folder, refused.append)
    for line in refused:
        say(line)
    rows = [shared_row(submitter, path.relative_to(folder), v) for submitter, path, v in files]
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / "index.html", site_page(rows, list(published_rows())))
    print(f"wrote {directory / 'index.html'}: {len(rows)} results")
    return 1 if refused else 0


def site_page(rows: list[dict[str, Any]], published: list[dict[str, Any]]) -> str:
    """The page of these rows; published ones stand apart from those that were checked."""
    known = {row["hardware"] for row in (*rows, *published)}
    prices = {d.name: d.usd_per_hour for d in devices() if d.name in known and d.usd_per_hour}
    content = {
        "groups": [],
        "made": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "version": __version__,
        "tiers": TIERS,
        "prices": prices,
        "rows": printable_data(rows),
        "published": printable_data(published),
    }
    return page_of(TEMPLATE, content)


def shared_row(submitter: str, path: Path, v: Verified) -> dict[str, Any]:
    """A file as the page's script takes it."""
    r, m = v.shared.result, v.shared.result.metrics
    e, observed = r.environment, r.observed
    hardware = device_called(r.device.hardware)
    kernels = []
    if observed:
        kernels += [f"{k}: {', '.join(v)}" for k, v in sorted(observed.attention.items())]
        kernels += [f"{k}: {n:g}" for k, n in sorted(observed.matmuls.items())]
        kernels += observed.fallbacks
    libraries: dict[str, Any] = e.get("libraries") or {}
    versions = {
        k: e.get(k) for k in ("python", "cuda", "hip", "cudnn", "nccl", "driver", "os", "cpu")
    }
    versions = {k: str(x) for k, x in (libraries | versions).items() if x}
    return {
        "hardware": r.device.hardware,
        "listed": v.known_hardware,
        "devices": r.device.count,
        "model": v.name,
        "workload": v.workload is not None,
        "format": v.number_format,
        "layout": layout_of(v),
        "batch": f"{r.batch.global_batch} x {r.batch.seq_len}",
        "rate": v.rate,
        "rates": list(v.rates),
        **rates_of(v.rate, m.flops_per_token_palm, hardware, bool(r.fp8)),
        "joule": m.tokens_per_joule,
        "memory": r.peak_memory[0],
        "tier": v.tier,
        "why": v.why_not_higher,
        "submitter": submitter,
        "date": r.started_at[:10],
        "torch": str(libraries.get("torch") or "unknown"),
        "driver": str(e.get("driver") or "none"),
        "versions": versions,
        "command": " ".join(r.command),
        "kernels": kernels,
        "notes": r.notes + r.unfit,
        "file": path.as_posix(),
    }


def layout_of(v: Verified) -> str:
    """The script, and the flags of speed that differ from their defaults."""
    r, default = v.shared.result, defaults(Args)
    words = [r.entrypoint.removesuffix(".py")]
    for name in sorted(of_kind(SPEED) - NOT_LAYOUT):
        value = r.args.get(name, default[name])
        if value != default[name] and r.ours:
            words.append(flag_of(name) if value is True else f"{flag_of(name)} {value}")
    return " ".join(words)


def rates_of(
    rate: float, flops: float | None, hardware: Hardware | None, fp8: bool
) -> dict[str, Any]:
    """TFLOP/s and MFU (palm) of a rate, against the dense BF16 peak that configs/hardware.json lists."""
    tflops = rate * flops / 1e12 if flops else None
    peak = hardware.bf16_tflops if hardware and hardware.platform != "cpu" else None
    return {
        "tflops": tflops,
        "mfu": tflops / peak if tflops and peak else None,
        "peak": f"{peak:g} TFLOP/s dense BF16: {hardware.source}" if peak and hardware else "",
        "fp8": fp8,
    }


def published_rows() -> Iterator[dict[str, Any]]:
    """Rows of benchmarks/published: what others said, which nobody here has checked."""
    for path in sorted(PUBLISHED.glob("*.json")):
        content = parse_json(path.read_text(encoding="utf-8"))
        for row in content["rows"]:
            flags, fp8 = row.get("flags", ""), "--use-fp8" in row.get("flags", "")
            yield {
                "hardware": row["gpu"],
                "devices": row["gpus"],
                "model": row.get("model") or Path(row["config"]).stem,
                "format": "fp8" if fp8 else "bf16",
                "layout": f"{row.get('script', '')} {flags}".strip(),
                "batch": f"{row.get('bsz', '?')} x {row.get('seq_len', '?')}",
                "rate": row["tokens_per_sec_per_gpu"],
                "source": content["source"],
                "link": content["link"] if str(content["link"]).startswith("https://") else "",
                "note": row.get("note", ""),
            }
