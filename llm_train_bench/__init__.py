"""The benchmark around the model: a package per subject; imports run downward (CONTRIBUTING.md).

The names below are for other programs (docs/PYTHON.md); everything else may change.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Public names by their modules, which are imported when a name is used: some tools have no torch.
_PUBLIC = {
    "Meter": "run.meter",
    "HFMeterCallback": "run.hf_callback",
    "LightningMeterCallback": "run.lightning_callback",
    "assert_no_regression": "compare.gate",
    "estimate_step": "estimate.predict",
    "read_result": "results.result_files",
}
__all__ = [
    "HFMeterCallback",
    "LightningMeterCallback",
    "Meter",
    "assert_no_regression",
    "estimate_step",
    "read_result",
]

if TYPE_CHECKING:
    from llm_train_bench.compare.gate import assert_no_regression
    from llm_train_bench.estimate.predict import estimate_step
    from llm_train_bench.results.result_files import read_result
    from llm_train_bench.run.hf_callback import HFMeterCallback
    from llm_train_bench.run.lightning_callback import LightningMeterCallback
    from llm_train_bench.run.meter import Meter


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
