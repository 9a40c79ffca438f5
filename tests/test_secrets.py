"""Secrets that are planted wherever a user may leave one are in no file, on no screen and not sent."""

import json
import sys

import pytest

import compare
from llm_train_bench.base.redaction import redact, redact_command, redact_text
from llm_train_bench.results import wandb_run
from tests.helpers import ROOT
from tests.test_meter import SMALL, TINY, measure

# A text with a secret in it, whose distinctive part is between ‹ and ›.
FORMS = """
hf_‹AbCdEfGhIjKlMnOpQrStUvWxYz01234567›
ghp_‹16C7e42F292c6912E7710c838347Ae178B4a›
github_pat_‹11ABCDEFG0123456789_abcdef›
sk-‹proj-1234567890abcdefghij›
https://user:‹hunter2›@host.example/x
https://host.example/data?sig=‹s3cr3t%2Bsig›&x=1
https://bucket.example/k?X-Amz-Signature=‹deadbeef›
https://hooks.slack.com/services/‹T000/B000/XXXX›
https://discord.com/api/webhooks/‹123/abc-def›
Authorization: Bearer ‹abcdef0123456789›
api_key=‹0a1b2c3d›
AKIA‹IOSFODNN7EXAMPLE›
eyJhbGciOiJIUzI1NiJ9.‹eyJzdWIiOiIxIn0.c2ln›
glpat-‹xyzxyzxyzxyzxyzxyzxy›
""".split("\n")[1:-1]
FLAGS = ("--pw", "--pwd", "--pat", "--bearer", "--api-key", "--hub-token", "--password", "--secret")
NAMES = ("api_key", "hub_token", "db_password", "PAT", "bearer", "x-webhook", "aws_secret", "pw")


def planted(text: str) -> tuple[str, str]:
    """The text, and the secret in it."""
    return text.replace("‹", "").replace("›", ""), text.partition("‹")[2].partition("›")[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_is_hidden_whatever_its_name(form):
    text, secret = planted(form)
    for around in ("{}", "failed at {} again", '{{"a": "{}"}}', "x={}"):
        assert secret not in redact_text(around.format(text))
    assert secret not in json.dumps(redact({"a": [{"b": text}], text: 1}))
    assert secret not in str(redact_command(["run.py", "--x", text, f"--y={text}"]))


def test_what_is_no_secret_stays():
    words = "--tokens 1e12 --tokenizer t.json --pass-type step --num-key-value-heads 8 --author me"
    texts = "configs/hf_gpt2-tiny.json hf_llama-3.1 runs/en-sk-v100 sk-learn-2024 basic attention"
    assert redact_command(words.split()) == words.split() and redact_text(texts) == texts
    kept = {"tokens_per_step": 8, "num_key_value_heads": 4, "ignored_keys": ["a"], "path": "x/y",
            "note": "https://host/x?step=3&design=4", "pad_token": "<pad>", "eos_token_id": 5,
            "key_layout": "bhsd", "forward_pass": "fused", "author": "me", "sac_freq": "1/4"}  # fmt: skip
    assert redact(kept) == kept
    hidden = {"password": 123, "token": {"value": "abc"}, "api_keys": ["abc"], "passphrase": "abc"}
    assert "abc" not in str(redact(hidden)) and "123" not in str(redact(hidden))
    assert redact_text("postgres://u:pa/ss@h/db token=plainS3") == "postgres://...@h/db token=..."


def test_no_file_has_a_planted_secret(tmp_path, monkeypatch, output_of):
    """They are in a loop's settings, command line, environment and error. W&B gets none either."""
    secrets = [planted(form) for form in FORMS]
    flags = [word for i, flag in enumerate(FLAGS) for word in (flag, f"flagsecret{i}")]
    monkeypatch.setattr(sys, "argv", ["theirs.py", *flags, *(text for text, _ in secrets)])
    for i, (text, _) in enumerate(secrets):
        monkeypatch.setenv(f"NCCL_X{i}", text)
    monkeypatch.setenv("TORCH_API_KEY", "envsecret")
    sent = []
    monkeypatch.setattr(
        wandb_run.WandbRun, "_send", lambda self, begun, _: sent.append(begun) or "sent"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    settings = {name: f"namedsecret{i}" for i, name in enumerate(NAMES)}
    settings |= {f"s{i}": text for i, (text, _) in enumerate(secrets)}
    with pytest.raises(ValueError):
        message = " ".join(text for text, _ in secrets)
        body = lambda step, i: i < 4 or (_ for _ in ()).throw(ValueError(message))  # noqa: E731
        measure(tmp_path / "runs", 6, body, TINY, track=["wandb"], settings=settings)
    measure(tmp_path / "runs", 6, settings=None, seq_len=8, **SMALL)
    shown = output_of(compare.main, tmp_path / "runs", "--output-dir", tmp_path / "out")
    (tmp_path / "screen").write_text(shown)
    (tmp_path / "sent").write_text("".join(begun.model_dump_json() for begun in sent))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 8 and sent
    for path in files:
        content = path.read_bytes().decode(errors="replace")
        for secret in ("flagsecret", "namedsecret", "envsecret", *(s for _, s in secrets)):
            assert secret not in content, (path.relative_to(tmp_path), secret)
    assert (ROOT / "docs/PYTHON.md").read_text().count("webhook")
