"""`regard info`: versions, devices, which backends can run and why others cannot, and how fast this machine is."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli import terminal
from regard.cli.options import about

OPTIONAL = ("triton", "transformers", "x-transformers", "matplotlib", "safetensors")
BF16 = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); print(float((a @ a)[0, 0]))"
PATIENCE = 120  # seconds: loading torch can take long on a busy machine


def info(
    measure: Annotated[
        bool,
        about("Measure this machine's speed (a few seconds) and save it for `regard cost`.", "--measure"),
    ] = False,
    threads: Annotated[int | None, about("Number of CPU threads for --measure (default: torch's).", min=1)] = None,
    as_json: Annotated[bool, about("Print the information as JSON.", "--json")] = False,
) -> None:
    """Show versions, devices, which backends can run and why others cannot, and whether bfloat16 works on this CPU.

    Examples:
      regard info
      regard info --json
      regard info --measure --threads 1
    """
    if threads is not None and not measure:
        terminal.stop("--threads is for --measure; give both")
    with terminal.one_line(ValueError, options=("threads",)):
        found = _measure(threads) if measure else {}
    lines = machine()
    if as_json:
        terminal.data(dict(lines) | ({"measured": found} if measure else {}))
        return
    for where, rates in found.items():
        lines.append((f"measured, {where}", _rates(rates)))
    width = max(len(name) for name, _ in lines)
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize  # in a pipe, a line is a line
    for name, what in lines:
        typer.echo(textwrap.fill(f"{name:<{width}}  {what}", room, subsequent_indent=" " * (width + 2)))


def machine() -> list[tuple[str, str]]:
    """Versions, devices and backends, as pairs."""
    import torch

    import regard
    from regard.cost._devices import processor

    lines = [
        ("regard", regard.__version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("numpy", metadata.version("numpy")),
        *((package, _version(package)) for package in OPTIONAL),
        ("cpu", f"{processor()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()}"),
        ("bfloat16 on cpu", bfloat16()),
    ]
    devices = ["cpu"]
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        lines.append((f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, {memory:.0f} GiB"))
    if torch.cuda.is_available():
        devices.append("cuda")
    else:
        built = torch.version.cuda or torch.version.hip
        lines.append(("cuda", "no device was found" if built else "this torch was built without it"))
    if torch.backends.mps.is_available():
        lines.append(("mps", "available"))
        devices.append("mps")
    for device in devices:
        lines.append((f"backends on {device}", ", ".join(regard.backends.available(device))))
        lines += [(f"{name} on {device}", f"cannot run: {reason}") for name, reason in refusals(device).items()]
    return lines


def refusals(device: str) -> dict[str, str]:
    """Why a backend cannot run even a plain call on a device, for those that cannot."""
    import torch

    import regard

    plain = torch.zeros(1, 1, 2, 64, device=device, dtype=torch.float16 if device == "cuda" else torch.float32)
    return {name: "; ".join(reasons) for name, reasons in regard.explain(plain, plain, plain).refusals.items()}


def bfloat16() -> str:
    """Whether products in bfloat16 work. Where a CPU says that it has AMX and its host does not let it be used, they
    end the process; so another process tries, once for each torch and setting."""
    import torch

    from regard.cost import _devices

    if not _has_amx():
        return "works: this CPU has no AMX, with which it can crash"
    key = f"bfloat16, torch {torch.__version__}, ONEDNN_MAX_CPU_ISA={os.environ.get('ONEDNN_MAX_CPU_ISA', '')}"
    found = _devices.remembered(key)
    if not isinstance(found, str):
        with terminal.saying("trying bfloat16 in a process of its own"):
            found = _try_bfloat16()
        _devices.remember(key, found)
    return found


def _has_amx() -> bool:
    information = Path("/proc/cpuinfo")
    return information.exists() and "amx_" in information.read_text(encoding="utf-8", errors="replace")


def _try_bfloat16() -> str:
    try:
        done = subprocess.run([sys.executable, "-c", BF16], capture_output=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return f"not known: a small product took more than {PATIENCE} s"
    if done.returncode == 0:
        return "works"
    if done.returncode == -signal.SIGILL:
        return (
            "WARNING: crashes. This CPU lists AMX and cannot use it; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before "
            "Python starts"
        )
    return f"WARNING: a small product ended with status {done.returncode}"


def _measure(threads: int | None) -> dict[str, dict[str, Any]]:
    """Rates of the CPU, and of the GPU where there is one; kept for later."""
    import torch

    from regard import cost
    from regard.cost import _devices

    found = {}
    for where in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        with terminal.saying(f"measuring {where}"):
            device = cost.measure(where, threads=threads)
        _devices.keep(device, where)
        found[where] = device.to_dict()
    return found


def _rates(device: dict[str, Any]) -> str:
    from regard._display.units import count

    threads = f"{device['threads']} thread{'s' if device['threads'] > 1 else ''}: " if device["threads"] else ""
    softmax = f"{count(device['exponentials'])} exponentials/s, " if device["exponentials"] else ""
    half = "" if device["threads"] else f"{count(device['flops']['bfloat16'])}FLOP/s in bfloat16, "
    flops = f"{count(device['flops']['float32'])}FLOP/s in float32, "
    return f"{threads}{flops}{half}{softmax}{count(device['bandwidth'])}B/s"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
