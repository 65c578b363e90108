"""`regard cost attention`: the least time of one call, next to the measured one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from regard._display.texts import reason, text
from regard.cli import terminal
from regard.cost._words import CALL

if TYPE_CHECKING:
    from regard.cost import AttentionCall, Device, Spread

LONGEST = 60.0  # seconds: a call that takes more is not timed
LINKS = {"link": 450.0, "between": 50.0}  # GB/s that a GPU receives from its own machine, and from others


def show(sizes: dict[str, Any], typed: dict[str, Any]) -> None:
    """The call of these sizes, on what was `typed`: every option of the command by its name."""
    from regard import cost

    on, threads, lang = typed["on"], typed["threads"], typed["lang"]
    missing = [terminal.flag(name) for name in ("length", "heads", "head_dim") if sizes.get(name) is None]
    if missing:
        raise ValueError(f"an attention call needs {', '.join(missing)}")
    if on is not None and (typed["measure"] or threads is not None):
        option = "--measure" if typed["measure"] else "--threads"
        raise ValueError(f"{option} is for this machine, and --on {on} names another; give one of them")
    counts = _counts(typed["gpus"])
    if counts and on is None:
        devices = ", ".join(cost.devices())
        raise ValueError(f"--gpus {typed['gpus']} needs --on, the device that each of them is: {devices}")
    sizes["causal"] = sizes["causal"] or sizes.get("window") is not None
    usual = "fp32" if on is None else "bf16"
    call = cost.AttentionCall(**sizes, dtype=usual if typed["dtype"] is None else typed["dtype"])
    device = _this_machine(threads, lang) if on is None else named(on)
    found = {way: cost.roofline(call, device, backward=way == "backward") for way in ("forward", "backward")}
    times: dict[str, float] = {}
    if typed["measure"]:
        times = _timed(call, threads, found["forward"].seconds + found["backward"].seconds, lang)
    links = [usual if typed[name] is None else typed[name] for name, usual in LINKS.items()]
    near, far = (each * 1e9 for each in links)
    several = [cost.spread(call, device, count, link=near, between=far) for count in counts]
    if typed["as_json"]:
        spreads = {"spread": [each.to_dict() for each in several]} if several else {}
        terminal.data(_data(call, device, found, times) | spreads)
    else:
        _print(call, device, found, times, lang)
        if several:
            _print_spread(several, links, lang)


def _counts(gpus: str | None) -> list[int]:
    """`8,64` as numbers."""
    words = [] if gpus is None else gpus.split(",")
    if not all(word.strip().isdigit() and int(word) for word in words):
        raise ValueError(f"--gpus is {gpus!r}; expected a number of GPUs of at least 1, or several, such as 8,64,1024")
    return [int(word) for word in words]


def _print_spread(several: list[Spread], links: list[float], lang: str) -> None:
    from regard._display.units import seconds, size
    from regard.cost._tables import columns

    typer.echo(text(CALL, lang, "spread"))
    heads = ("computing", "received", "from other machines", "receiving", "in all", "keys and values")
    rows: list[tuple[str, ...]] = [("GPUs" if lang == "en" else "GPU", *(text(CALL, lang, key) for key in heads))]
    for each in several:
        sizes = size(each.received), size(each.from_machines), seconds(each.receiving), seconds(each.seconds)
        rows.append((str(each.gpus), seconds(each.computing), *sizes, size(each.room)))
    typer.echo("\n".join(columns(rows)))
    typer.echo(text(CALL, lang, "links", near=links[0], far=links[1]))


def named(on: str) -> Device:
    """The device of that name, as `--on` gives it."""
    from regard import cost

    if on not in cost.devices():
        raise ValueError(f"--on is {on!r}; expected one of {', '.join(cost.devices())}")
    return cost.device(on)


def _this_machine(threads: int | None, lang: str) -> Device:
    """What `regard info --measure` found, or finds now."""
    import torch

    from regard import cost
    from regard.cost import _devices

    if threads is not None and threads < 1:
        raise ValueError(f"--threads must be at least 1, got {threads}")
    known = cost.measured(threads or torch.get_num_threads())
    if known is not None:
        return known
    with terminal.saying(text(CALL, lang, "measuring")):
        found = cost.measure(threads=threads)
    _devices.keep(found)
    return found


def _timed(call: AttentionCall, threads: int | None, predicted: float, lang: str) -> dict[str, float]:
    from regard import cost

    if predicted > LONGEST:
        raise ValueError(f"--measure would take more than {predicted:.0f} s for one run; give a shorter --length")
    with terminal.saying(text(CALL, lang, "timing")):
        try:
            forward, backward = cost.measure_call(call, threads=threads)
        except (RuntimeError, MemoryError) as error:
            said = reason(error, otherwise="out of memory")
            raise ValueError(f"the call cannot be timed here: {said}") from None
    return {"forward": forward, "backward": backward}


def _data(call: AttentionCall, device: Device, found: dict[str, Any], times: dict[str, float]) -> dict[str, Any]:
    import dataclasses

    data: dict[str, Any] = {"call": dataclasses.asdict(call), "device": device.to_dict(), "pairs": call.pairs}
    for way, one in found.items():
        backward = way == "backward"
        data[way] = one.to_dict() | {"flops": call.flops(backward=backward), "bytes": call.bytes(backward=backward)}
        if times:
            data[way] |= {"measured": times[way], "ratio": times[way] / one.seconds}
    return data


def _print(call: AttentionCall, device: Device, found: dict[str, Any], times: dict[str, float], lang: str) -> None:
    from regard._display.units import count, seconds, size, whole
    from regard.cost._tables import columns

    say = partial(text, CALL, lang)
    kind = say("causal" if call.causal else "every pair")
    kind += say("window", window=call.window) if call.window is not None else ""
    heads = whole(call.heads)
    heads = heads if call.kv_heads is None else say("over", heads=heads, shared=call.kv_heads)
    sizes = {"batch": whole(call.batch), "heads": heads, "dim": call.head_dim, "length": whole(call.length)}
    typer.echo(say("call", **sizes, kind=kind, dtype=call.dtype))
    # a published peak cannot be passed; rates that were measured can, by a call that runs better than they did
    predicted = "at least" if device.threads is None else "predicted"
    names = ("memory", predicted, "bound by", *(("measured", "ratio") if times else ()))
    rows: list[tuple[str, ...]] = [("", "FLOP", *map(say, names))]
    for way, one in found.items():
        backward = way == "backward"
        flops, memory = call.flops(backward=backward), call.bytes(backward=backward)
        measured = (seconds(times[way]), f"{times[way] / one.seconds:.2f}") if times else ()
        rows.append((say(way), count(flops), size(memory), seconds(one.seconds), say(one.bound), *measured))
    typer.echo("\n".join(columns(rows)))
    threads = (
        "" if device.threads is None else say("thread" if device.threads == 1 else "threads", count=device.threads)
    )
    softmax = "" if device.exponentials is None else say("exponentials", count=count(device.exponentials))
    typer.echo(say("device", name=device.name, threads=threads, source=device.source, date=device.date))
    rates = {"flops": count(device.flops[call.dtype]), "bytes": count(device.bandwidth)}
    typer.echo(say("rates", softmax=softmax, **rates))
