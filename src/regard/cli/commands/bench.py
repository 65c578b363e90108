"""`regard bench`: one call, timed on each backend and compared with PyTorch's own function."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from regard.cli import calls, complete, options, terminal
from regard.cli.options import about

if TYPE_CHECKING:
    from torch import Tensor

    from regard.cli.calls import Call

SAMPLE = 0.02  # seconds: a sample repeats the call until it lasts this long, so that the clock does not matter
ROOM = 4 * 2**30  # bytes: what needs more is run only when it is named

Work = Callable[[], object]


def bench(
    query: calls.Query,
    key: calls.Key = None,
    value: calls.Value = None,
    mask: calls.Mask = None,
    softcap: calls.Softcap = None,
    grad: Annotated[bool, about("Time the backward pass too.", "--grad")] = False,
    dtype: calls.Dtype = "float32",
    device: calls.Device = "cpu",
    backend: Annotated[
        str | None,
        options.some_of(
            complete.BACKENDS,
            "Backends to time, comma-separated (default: auto and all of the device's but the reference).",
        ),
    ] = None,
    rounds: Annotated[int, about("Number of times each backend is timed.", min=3)] = 9,
    as_json: Annotated[bool, about("Print every sample as JSON.", "--json")] = False,
) -> None:
    """Time a call on each backend and compare each with PyTorch's scaled_dot_product_attention.

    The inputs are random. Every round times each backend once, in rotating
    order; a ratio is the median over the rounds. PyTorch's function timed
    against itself shows how noisy the machine is.

    Examples:
      regard bench 1,8,1024,64 --mask 'causal()'
      regard bench 1,8,1024,64 --mask 'causal() & window(left=64)' --grad
      regard bench 1,8,4096,64 --backend sdpa,blockwise --rounds 15 --json
    """
    with terminal.one_line(ValueError, TypeError, options=calls.OPTIONS, impossible="this call cannot be timed here"):
        call = calls.read(query, key, value, mask, dtype, device)
        works, left_out = _works(call, softcap, grad, backend)
        samples = _time(works, rounds, call.device)
    rows = [_row(name, samples[name], samples[next(iter(samples))]) for name in samples]
    if as_json:
        terminal.data({"rows": rows, "left_out": left_out})
    else:
        _print(rows, left_out)


def _works(call: Call, softcap: float | None, grad: bool, wanted: str | None) -> tuple[dict[str, Work], dict[str, str]]:
    """What is timed, PyTorch's function first where it can say the call; and why the rest is not."""
    import torch

    import regard

    names = calls.backends(wanted, call.device)
    if wanted is None:
        names.remove("reference")
    torch.manual_seed(0)
    inputs = [torch.randn(s, dtype=call.dtype, device=call.device, requires_grad=grad) for s in call.shapes]
    given: dict[str, Any] = {"mask": call.mask, "softcap": softcap}
    works: dict[str, Work] = {}
    left_out: dict[str, str] = {}
    if softcap is None:
        torch_call = _of_torch(inputs, call.mask)
        works["torch"] = works["torch again"] = _run(torch_call, inputs, grad)
    else:
        left_out["torch"] = "it has no softcap"
    for name in names:
        try:
            plan = regard.explain(*inputs, **given, backend=name)
        except regard.Refused as refused:
            left_out[name] = str(refused)
            continue
        if wanted is None and plan.cost.peak_bytes > ROOM:
            left_out[name] = f"it needs {plan.cost.peak_bytes / 2**30:.0f} GiB: name it with --backend to run it"
            continue
        label = f"auto: {plan.backend}" if name == "auto" else name
        call_of_regard = functools.partial(regard.attention, *inputs, **given, backend=name)
        works[f"regard {label}"] = _run(call_of_regard, inputs, grad)
    if not works:
        raise ValueError("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    return works, left_out


def _of_torch(inputs: list[Tensor], mask: Any) -> Callable[[], Tensor]:
    """The same call in PyTorch's terms, by its flag where that means the same, else with the mask written out."""
    from torch.nn.functional import scaled_dot_product_attention

    from regard import masks

    query, key, value = inputs
    how: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]}
    if mask == masks.causal() and query.shape[2] == key.shape[2]:
        how["is_causal"] = True
    elif mask is not None:
        mask.check(*query.shape[:3], key.shape[2])
        how["attn_mask"] = mask.dense(query.shape[2], key.shape[2], device=query.device)
    return lambda: scaled_dot_product_attention(query, key, value, **how)


def _run(forward: Callable[[], Tensor], inputs: list[Tensor], grad: bool) -> Work:
    import torch

    def work() -> object:
        with torch.set_grad_enabled(grad):
            out = forward()
            return torch.autograd.grad(out.sum(), inputs) if grad else out

    return work


def _time(works: dict[str, Work], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of one run, round by round."""
    from regard.cost._measure import waiting

    wait = waiting(device)
    names = list(works)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with terminal.progress() as bars:
        task = bars.add_task("timing", total=len(names) * (rounds + 1))
        repeats = {}
        for name in names:
            _seconds(works[name], 1, wait)  # the first run pays for plans, tables and memory
            repeats[name] = max(1, round(SAMPLE / max(_seconds(works[name], 1, wait), 1e-7)))
            bars.advance(task)
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                samples[name].append(_seconds(works[name], repeats[name], wait))
                bars.advance(task)
    return samples


def _seconds(work: Work, repeats: int, wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter() - start) / repeats


def _row(name: str, own: list[float], base: list[float]) -> dict[str, Any]:
    ratios = [one / other for one, other in zip(own, base, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return {
        "name": name,
        "seconds": statistics.median(own),
        "ratio": ratio,
        "quartiles": [low, high],
        "samples": own,
    }


def _print(rows: list[dict[str, Any]], left_out: dict[str, str]) -> None:
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    table.add_column("what ran", no_wrap=True)
    for column in ("milliseconds", f"× {rows[0]['name']}", "middle half of the rounds"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        low, high = row["quartiles"]
        table.add_row(row["name"], f"{1e3 * row['seconds']:.3f}", f"{row['ratio']:.2f}", f"{low:.2f} – {high:.2f}")
    console = terminal.console()
    console.print(table)
    for name, reason in left_out.items():
        console.print(f"not run: {name}: {' '.join(reason.split())}", markup=False, highlight=False)
