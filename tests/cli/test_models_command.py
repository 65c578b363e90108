"""`regard models`."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from regard import models
from regard.cli import app


def test_every_name_is_listed_with_its_size() -> None:
    run = CliRunner().invoke(app, ["models"], env={"COLUMNS": "80"})
    assert run.exit_code == 0
    lines = {line.split()[0]: line for line in run.output.splitlines()}
    assert max(map(len, lines.values())) <= 80 and "…" not in run.output  # whole names, on the narrowest usual terminal
    assert set(models.names()) <= set(lines)
    assert "174 604 259 328" in lines["gpt3-175b"] and "349.21" in lines["gpt3-175b"]
    assert "32 / 8" in lines["llama-3-8b"] and "6 + 6" in lines["transformer-big"]


def test_the_json_holds_the_whole_configuration() -> None:
    found = {row["name"]: row for row in json.loads(CliRunner().invoke(app, ["models", "--json"]).output)}
    assert list(found) == models.names()
    assert found["bert-base"]["parameters"] == 109_482_240
    assert found["llama-3-8b"]["model"] == "Decoder"
    assert models.DecoderConfig(**found["llama-3-8b"]["config"]) == models.config("llama-3-8b")
    assert found["deepseek-v3-attention"]["config"]["rotary_scaling"]["kind"] == "YaRN"
