"""The meaning of Hugging Face config keys for a training step, from config_keys.json. Needs no torch."""

import json
from pathlib import Path
from typing import Any

_TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("config_keys.json").read_text())
# Names of activations to the function of model.layers that computes them.
ACTIVATIONS: dict[str, str] = _TABLE["activations"]
# Transformer Engine's names for a plain and a gated MLP, which activates the first half of its rows; its
# gelu is the tanh approximation.
TE_ACTIVATIONS = dict(gelu_tanh=("gelu", "geglu"), relu=("relu", "reglu"), silu=("silu", "swiglu"))
# Names that transformers takes for a key, the strongest first.
SPELLINGS: dict[str, list[str]] = _TABLE["spellings"]
# Names of the number of modules of multi-token prediction.
MTP_KEYS = SPELLINGS["num_nextn_predict_layers"]
# The fields of ModelConfig, Latent, Recurrent and Experts, by the keys that give them.
MODEL, LATENT, RECURRENT, EXPERTS = (
    {key: field for field, keys in _TABLE["fields"][part].items() for key in keys}
    for part in ("model", "latent", "recurrent", "experts")
)
# Keys of the first llm-train-bench's dialect, and those that they become.
FIRST_DIALECT: dict[str, str] = _TABLE["first_dialect"]
# Keys that a run names in a remark, and why: what a file means by them is not done, or is done anyway.
WITHOUT_EFFECT: dict[str, str] = _TABLE["without_effect"]
# Keys that change the computation unless they are null, false, 0, empty or, for factors, 1.
FACTORS: list[str] = _TABLE["factors"]
UNSUPPORTED = frozenset(FACTORS + _TABLE["unsupported"])
# Metadata, generation settings and switches that leave the training computation as it is.
IGNORED = frozenset(_TABLE["ignored"])
