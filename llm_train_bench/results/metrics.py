"""The metrics of a result, and their registry: unit, format, meaning, and where each shows. No torch.

fields.toml is the registry. The final table, runs.csv, TensorBoard, comparisons and docs/METRICS.md are
made of it. To add a metric: add it there, fill it where it is measured, run `make docs`.
"""

import dataclasses
import string
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, create_model

from llm_train_bench.base.strict import Strict


@dataclasses.dataclass(frozen=True)
class Metric:
    """A row of the registry; fields.toml says what each part is."""

    text: str
    unit: str = ""
    format: str = "g"
    shows: str = ""
    column: str = ""
    type: str = "float"


# Sections of fields.toml: what each field of a result is, by the class that has it.
FIELDS = tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))
METRICS = {name: Metric(**row) for name, row in FIELDS["Metrics"].items()}
RUN_COLUMNS = [name for name, metric in METRICS.items() if "runs" in metric.shows]
MEANS = [name for name, metric in METRICS.items() if "mean" in metric.shows]
_TYPES = {"float": float, "int": int, "str": str, "bool": bool}
_DECLARED: dict[str, Any] = {name: (_TYPES[row.type] | None, None) for name, row in METRICS.items()}


class Metrics(create_model("Figures", __base__=Strict, **_DECLARED)):
    """Everything measured; None where it could not be, with the reason in `remarks`.

    Those below are not one figure, or have another default; fields.toml declares all others.
    """

    n_measured_steps: int = 0
    time_parts_s: dict[str, float] | None = None
    val_losses: list[tuple[int, float | None]] = Field(default_factory=list)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


def metric_text(name: str, value: Any) -> str:
    """A value as the registry formats it, without its unit; or that it is unknown."""
    if value is None:
        return "unknown"
    form = METRICS[name].format
    return format(1e3 * value, ".1f") if form == "ms" else format(value, form)


def metric_rows(metrics: Metrics) -> list[tuple[str, str]]:
    """Label and text of each line of the final table that has a known metric."""
    values, rows = metrics.model_dump(), []
    for label, template in FIELDS["console"].items():
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name]
        if any(values[name] is not None for name in names):
            texts = {name: metric_text(name, values[name]) for name in names}
            rows.append((label, template.format_map(texts)))
    return rows
