"""The help in Chinese: `regard --lang zh --help`, and of each command that has `--lang`."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

from regard._display.texts import breaks, left, parsed, width

WIDTH = 80


@cache
def texts() -> dict[str, Any]:
    """What each command does (`about`), the `panels` of the list of commands, and each parameter by its name: of one
    command (`options`), or of several (`common`)."""
    found: dict[str, Any] = parsed("regard.cli", "chinese.json")
    return found


def asked_for(args: list[str]) -> bool:
    """Whether these words of a command ask for Chinese."""
    return "--lang=zh" in args or ("--lang", "zh") in itertools.pairwise(args)


def has_help(context: Any) -> bool:
    """Whether a command's help is here: those are, that speak Chinese themselves."""
    return _name(context) in (*texts()["options"], "regard")


def _name(context: Any) -> str:
    return str(context.info_name) if context.parent is not None else "regard"


def page(command: Any, context: Any) -> str:
    """The help of a command, laid out here: what prints the English help breaks lines only at spaces."""
    name = _name(context)
    about = texts()["about"][name].split("\n\n")
    _, _, examples = (command.help or "").partition("Examples:")
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"用法：{context.command_path} {usage}", "", *(line for part in about for line in _wrapped(part, 0)), ""]
    lines += ["示例：", *(f"  {line.strip()}" for line in examples.strip().splitlines()), ""]
    params = command.get_params(context)
    for title, kind in (("参数", "argument"), ("选项", "option")):
        rows = [(_typed(one), _said(name, one)) for one in params if one.param_type_name == kind]
        lines += [f"{title}：", *_columns(rows), ""] if rows else []
    inner = getattr(command, "commands", {})
    for panel, title in texts()["panels"].items() if inner else ():
        rows = [
            (one, texts()["about"][one].partition("\n")[0])
            for one, its in inner.items()
            if its.rich_help_panel == panel
        ]
        lines += [f"{title}：", *_columns(rows), ""]
    return "\n".join(lines)


def _typed(param: Any) -> str:
    return str(param.name) if param.param_type_name == "argument" else ", ".join(sorted(param.opts, key=len))


def _said(name: str, param: Any) -> str:
    said = texts()["options"].get(name, {}).get(param.name) or texts()["common"].get(param.name) or param.help or ""
    shown = getattr(param, "show_default", False) and param.default not in (None, False) and "默认" not in said
    return f"{said}（默认：{param.default}）" if shown else said


def _columns(rows: list[tuple[str, str]]) -> list[str]:
    wide = max(width(one) for one, _ in rows) + 4
    lines = []
    for one, said in rows:
        first, *rest = _wrapped(said, wide)
        lines += [left(f"  {one}", wide) + first, *(" " * wide + line for line in rest)]
    return lines


def _wrapped(said: str, indent: int) -> list[str]:
    places = [0, *breaks(said, WIDTH - indent), len(said)]
    return [said[start:stop].rstrip() for start, stop in itertools.pairwise(places)]
