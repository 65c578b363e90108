"""`regard cost attention`: the least time of one call, next to the measured one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from regard.cli import terminal

if TYPE_CHECKING:
    from regard.cost import AttentionCall, Device, Spread

LONGEST = 60.0  # seconds: a call that takes more is not timed


def show(
    sizes: dict[str, Any],
    dtype: str | None,
    on: str | None,
    timed: bool,
    threads: int | None,
    as_json: bool,
    gpus: str | None = None,
    links: tuple[float, float] = (450.0, 50.0),
) -> None:
    from regard import cost

    missing = [f"--{name.replace('_', '-')}" for name in ("length", "heads", "head_dim") if sizes.get(name) is None]
    if missing:
        raise ValueError(f"an attention call needs {', '.join(missing)}")
    if on is not None and (timed or threads is not None):
        option = "--measure" if timed else "--threads"
        raise ValueError(f"{option} is for this machine, and --on {on} names another; give one of them")
    counts = _counts(gpus)
    if counts and on is None:
        raise ValueError(f"--gpus {gpus} needs --on, the device that each of them is: {', '.join(cost.devices())}")
    sizes["causal"] = sizes["causal"] or sizes.get("window") is not None
    usual = "fp32" if on is None else "bf16"
    call = cost.AttentionCall(**sizes, dtype=usual if dtype is None else dtype)
    device = _this_machine(threads) if on is None else named(on)
    found = {way: cost.roofline(call, device, backward=way == "backward") for way in ("forward", "backward")}
    times: dict[str, float] = {}
    if timed:
        times = _timed(call, threads, found["forward"].seconds + found["backward"].seconds)
    near, far = (each * 1e9 for each in links)
    several = [cost.spread(call, device, count, link=near, between=far) for count in counts]
    if as_json:
        spreads = {"spread": [each.to_dict() for each in several]} if several else {}
        terminal.data(_data(call, device, found, times) | spreads)
    else:
        _print(call, device, found, times)
        if several:
            _print_spread(several, links)


def _counts(gpus: str | None) -> list[int]:
    """`8,64` as numbers."""
    words = [] if gpus is None else gpus.split(",")
    if not all(word.strip().isdigit() and int(word) for word in words):
        raise ValueError(f"--gpus is {gpus!r}; expected a number of GPUs of at least 1, or several, such as 8,64,1024")
    return [int(word) for word in words]


def _print_spread(several: list[Spread], links: tuple[float, float]) -> None:
    from regard._display.units import seconds, size
    from regard.cost._tables import columns

    typer.echo("Its tokens in parts on several GPUs, forward; the GPU that has most:")
    rows = [("GPUs", "computing", "received", "from other machines", "receiving", "in all", "keys and values")]
    for each in several:
        sizes = size(each.received), size(each.from_machines), seconds(each.receiving), seconds(each.seconds)
        rows.append((str(each.gpus), seconds(each.computing), *sizes, size(each.room)))
    for line in columns(rows):
        typer.echo(line)
    typer.echo(f"8 GPUs a machine, {links[0]:g} GB/s to a GPU within it and {links[1]:g} GB/s from outside.")


def named(on: str) -> Device:
    """The device of that name, as `--on` gives it."""
    from regard import cost

    if on not in cost.devices():
        raise ValueError(f"--on is {on!r}; expected one of {', '.join(cost.devices())}")
    return cost.device(on)


def _this_machine(threads: int | None) -> Device:
    """What `regard info --measure` found, or finds now."""
    import torch

    from regard import cost
    from regard.cost import _devices

    if threads is not None and threads < 1:
        raise ValueError(f"--threads must be at least 1, got {threads}")
    known = cost.measured(threads or torch.get_num_threads())
    if known is not None:
        return known
    with terminal.saying("measuring this machine, once"):
        found = cost.measure(threads=threads)
    _devices.keep(found)
    return found


def _timed(call: AttentionCall, threads: int | None, predicted: float) -> dict[str, float]:
    from regard import cost

    if predicted > LONGEST:
        raise ValueError(f"--measure would take more than {predicted:.0f} s for one run; give a shorter --length")
    with terminal.saying("timing the call"):
        try:
            forward, backward = cost.measure_call(call, threads=threads)
        except (RuntimeError, MemoryError) as error:
            said = (str(error).splitlines() or ["out of memory"])[0]
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


def _print(call: AttentionCall, device: Device, found: dict[str, Any], times: dict[str, float]) -> None:
    from regard._display.units import count, seconds, size, whole
    from regard.cost._tables import columns

    kind = "causal" if call.causal else "every pair"
    kind += f", window {call.window}" if call.window is not None else ""
    shared = "" if call.kv_heads is None else f" over {call.kv_heads}"
    heads = f"{whole(call.batch)} × {whole(call.heads)}{shared} heads of {call.head_dim}"
    typer.echo(f"attention: {heads}, {whole(call.length)} tokens, {kind}, {call.dtype}")
    # a published peak cannot be passed; rates that were measured can, by a call that runs better than they did
    predicted = "at least" if device.threads is None else "predicted"
    rows = [("", "FLOP", "memory", predicted, "bound by", *(("measured", "ratio") if times else ()))]
    for way, one in found.items():
        backward = way == "backward"
        flops, memory = call.flops(backward=backward), call.bytes(backward=backward)
        measured = (seconds(times[way]), f"{times[way] / one.seconds:.2f}") if times else ()
        rows.append((way, count(flops), size(memory), seconds(one.seconds), one.bound, *measured))
    for line in columns(rows):
        typer.echo(line)
    threads = "" if device.threads is None else f", {device.threads} thread{'s' if device.threads > 1 else ''}"
    softmax = "" if device.exponentials is None else f"{count(device.exponentials)} exponentials/s, "
    typer.echo(f"{device.name}{threads} ({device.source}, {device.date}):")
    typer.echo(f"{count(device.flops[call.dtype])}FLOP/s, {softmax}{count(device.bandwidth)}B/s")
