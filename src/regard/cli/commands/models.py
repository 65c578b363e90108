"""`regard models`: the configurations that have a name, with their sizes."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from regard._display.units import whole
from regard.cli import terminal
from regard.cli.options import about


def models(as_json: Annotated[bool, about("Print the list as JSON.", "--json")] = False) -> None:
    """List the named configurations of regard.models with their sizes. Loads no weights.

    Examples:
      regard models
      regard models --json
    """
    from regard import models as zoo

    rows = [_row(zoo, name) for name in zoo.names()]
    if as_json:
        terminal.data(rows)
    else:
        _print(rows)


def _row(zoo: Any, name: str) -> dict[str, Any]:
    config = zoo.config(name)
    model = zoo.build(config, device="meta")
    fields = dataclasses.asdict(config)
    if config_scaling := getattr(config, "rotary_scaling", None):
        fields["rotary_scaling"] = {"kind": type(config_scaling).__name__, **fields["rotary_scaling"]}
    return {
        "name": name,
        "model": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "config": fields,
    }


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    # without lines between columns nothing is cut in 80 characters
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("name", "model"):
        table.add_column(column, no_wrap=True)
    for column in ("parameters", "16-bit\nGB", "layers", "width", "heads"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        config = row["config"]
        table.add_row(
            row["name"],
            row["model"],
            whole(row["parameters"]),
            f"{2 * row['parameters'] / 1e9:.2f}",
            _layers(config),
            str(config["embed_dim"]),
            _heads(config),
        )
    terminal.console().print(table)


def _layers(config: dict[str, Any]) -> str:
    if "num_layers" not in config:
        return "1"
    if "decoder_layers" not in config:
        return str(config["num_layers"])
    return f"{config['num_layers']} + {config['decoder_layers'] or config['num_layers']}"


def _heads(config: dict[str, Any]) -> str:
    kv = config.get("num_kv_heads")
    shared = f" / {kv}" if kv not in (None, config["num_heads"]) else ""
    return f"{config['num_heads']}{shared}"
