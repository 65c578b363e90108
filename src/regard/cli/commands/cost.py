"""`regard cost`: what a model costs, and how long an attention call takes at least."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard._display.texts import language, text
from regard.cli import complete, options, terminal
from regard.cli.options import about

if TYPE_CHECKING:
    from regard import models as zoo
    from regard.cost import Cost

NAMES = (
    "attention", "bert-base", "bert-large", "vit-base", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-175b",
    "llama-2-7b", "llama-3-8b", "transformer-base", "transformer-big", "whisper-tiny", "deepseek-v3-attention",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16", "float64", "fp32", "bf16", "fp16", "fp64")
DEVICES = ("h100", "h200", "a100", "rtx4090")
PICTURES = (".png", ".svg", ".pdf")
# What an option is called in a configuration, and the same for the arguments of `cost.of` and `cost.AttentionCall`.
FIELDS = {
    "layers": "num_layers", "d_model": "embed_dim", "heads": "num_heads", "kv_heads": "num_kv_heads",
    "head_dim": "head_dim", "ff_dim": "ff_dim", "vocab": "vocab_size", "window": "window", "gated": "gated",
}  # fmt: skip
ARGUMENTS = {"latent": "kv_lora_rank", "q_latent": "q_lora_rank"} | {
    name: name
    for name in (
        "heads", "kv_heads", "length", "batch", "dtype", "device", "source_length", "int8", "rolling", "sinks",
        "rope_dim", "threads", "link", "between", "experts",
    )
}  # fmt: skip
OPTIONS = {argument: option for names in (FIELDS, ARGUMENTS) for option, argument in names.items()}
FOR_MODELS = (
    "layers", "d_model", "ff_dim", "gated", "vocab", "latent", "q_latent", "int8", "rolling", "sinks", "source_length",
    "rope_dim", "device", "plot", "experts", "active",
)  # fmt: skip
FOR_CALLS = ("causal", "measure", "threads", "gpus", "link", "between")
WORDS = 32_000
ROPE = 64


def cost(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of a configuration (`regard models` lists them), or attention for the time of one call. "
            "Without a name, --layers, --d-model and --heads describe a model.",
            autocompletion=complete.one_of(NAMES),
        ),
    ] = None,
    length: Annotated[int | None, about("Number of tokens per sequence (default: the model's limit).")] = None,
    batch: Annotated[int, about("Number of sequences in the batch.")] = 1,
    dtype: Annotated[
        str | None,
        options.one_of(
            DTYPES, "Data type of weights, activations and cache (default: bf16; fp32 for a call on this machine)."
        ),
    ] = None,
    source_length: Annotated[int | None, about("Number of tokens the encoder of an encoder-decoder reads.")] = None,
    layers: Annotated[int | None, about("Number of layers.")] = None,
    d_model: Annotated[int | None, about("Width of a token's vector.")] = None,
    heads: Annotated[int | None, about("Number of query heads.")] = None,
    kv_heads: Annotated[
        int | None, about("Number of key/value heads: 1 for MQA, a divisor of --heads for GQA.")
    ] = None,
    head_dim: Annotated[int | None, about("Width of a head (default: --d-model divided by --heads).")] = None,
    ff_dim: Annotated[int | None, about("Width of the feed-forward network (default: 4 × --d-model).")] = None,
    gated: Annotated[bool, about("Gated feed-forward network with three matrices (SwiGLU).", "--gated")] = False,
    vocab: Annotated[int | None, about("Vocabulary size (default: 32000).")] = None,
    window: Annotated[int | None, about("Window: a token attends to this many tokens before it.")] = None,
    latent: Annotated[int | None, about("Latent attention (MLA) with a latent vector of this width.")] = None,
    rope_dim: Annotated[int | None, about("With --latent: width of the rotary key (default: 64).")] = None,
    q_latent: Annotated[int | None, about("With --latent: width of the queries' latent vector.")] = None,
    experts: Annotated[
        int | None, about("Mixture of experts: number of feed-forward networks of --ff-dim per layer.")
    ] = None,
    active: Annotated[int | None, about("With --experts: number of experts per token (default: 2).")] = None,
    int8: Annotated[bool, about("Store the cache in int8, one byte per number.", "--int8")] = False,
    rolling: Annotated[bool, about("Keep only the last --window tokens in the cache.", "--rolling")] = False,
    sinks: Annotated[int, about("With --rolling: number of first tokens to keep too.")] = 0,
    device: Annotated[
        str | None,
        about("Device whose kernels decide what the backward pass keeps: cuda or cpu (default: cuda)."),
    ] = None,
    on: Annotated[
        str | None,
        options.one_of(DEVICES, "Device for the roofline: its peak speed gives a lower bound on the time."),
    ] = None,
    causal: Annotated[bool, about("For attention: causal mask.", "--causal")] = False,
    measure: Annotated[bool, about("For attention: also time the call on this machine.", "--measure")] = False,
    threads: Annotated[int | None, about("For attention on this machine: number of CPU threads.")] = None,
    gpus: Annotated[
        str | None,
        about("For attention: split the tokens over this many GPUs of --on; several counts as 8,64,1024."),
    ] = None,
    link: Annotated[
        float | None,
        about("With --gpus: GB/s that a GPU receives within a machine of 8 GPUs (default: 450)."),
    ] = None,
    between: Annotated[
        float | None, about("With --gpus: GB/s that a GPU receives from other machines (default: 50).")
    ] = None,
    plot: Annotated[
        Path | None,
        about("Plot the cost against the length into this file (png, svg, pdf).", dir_okay=False),
    ] = None,
    lang: Annotated[str, options.language("Language of the table: en or zh.")] = "en",
    as_json: Annotated[bool, about("Print the numbers as JSON.", "--json")] = False,
) -> None:
    """Compute what a model costs: parameters, FLOPs, activation memory, KV cache; or the least time of one call.

    Examples:
      regard cost gpt3-175b
      regard cost llama-3-8b --length 131072 --batch 4 --plot llama.png
      regard cost --layers 32 --d-model 4096 --heads 32 --kv-heads 8 --length 131072 --batch 4 --dtype bf16
      regard cost --layers 32 --d-model 4096 --heads 32 --latent 512 --int8
      regard cost --layers 32 --d-model 4096 --heads 32 --kv-heads 8 --ff-dim 14336 --gated --experts 8 --active 2
      regard cost attention --length 4096 --heads 8 --head-dim 64 --causal --on h200
      regard cost attention --length 2048 --heads 8 --head-dim 64 --causal --measure
      regard cost attention --length 1000000 --heads 32 --kv-heads 8 --head-dim 128 --causal --on h200 --gpus 8,64,1024
    """
    typed = dict(locals())  # every option by its name
    with terminal.one_line(ValueError, TypeError, options=OPTIONS):
        language(lang)
        given = {option: value for option in FIELDS if (value := typed[option]) is not None and value is not False}
        if name == "attention":
            _refuse(typed, FOR_MODELS, "is for models, not for one attention call")
            if gpus is None:
                _refuse(typed, ("link", "between"), "needs --gpus")
            from regard.cli import roofline

            roofline.show({"length": length, "batch": batch, "causal": causal, **given}, typed)
            return
        _refuse(typed, FOR_CALLS, "is for one call: regard cost attention --length … --heads … --head-dim …")
        if plot is not None:
            _check_plot(plot)
        if latent is not None:
            _refuse(typed, ("kv_heads",), "does not go with --latent: all heads read one latent; leave it out")
        if experts is None:
            _refuse(typed, ("active",), "needs --experts")
        bill = _bill(name, given, typed)
        times = _times(bill, on)
        if plot is not None:
            bill.plot(lang).savefig(plot, dpi=120)
    if as_json:
        terminal.data(bill.to_dict() | ({"times": times} if times else {}))
    else:
        _print(bill, times, on, plot, lang)


def _print(bill: Cost, times: dict[str, Any], on: str | None, plot: Path | None, lang: str) -> None:
    from regard._display.units import seconds
    from regard.cost._words import BILL

    typer.echo(bill.table(lang))
    if times:
        each = {way: seconds(times[way]) for way in ("forward", "backward", "recomputed")}
        typer.echo(text(BILL, lang, "peak", device=on, **each))
    if plot is not None:
        typer.echo(text(BILL, lang, "wrote", file=plot))


def _refuse(typed: dict[str, Any], options: Iterable[str], why: str) -> None:
    for option in options:
        value = typed[option]
        if value is not None and value is not False and (option, value) != ("sinks", 0):
            raise ValueError(f"{terminal.flag(option)} {why}")


def _config(name: str | None, given: dict[str, Any], length: int | None) -> tuple[Any, list[str]]:
    """The configuration of a name, with what was changed, or of the options alone; and what was assumed."""
    from regard import models

    changes = {FIELDS[option]: value for option, value in given.items()}
    if name is not None:
        if name not in models.names():
            near = difflib.get_close_matches(name, models.names(), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(
                f"there is no configuration {name!r}: {hint}expected one of {', '.join(models.names())}, "
                "or none and --layers, --d-model and --heads"
            )
        known = {field.name for field in dataclasses.fields(models.config(name))}
        for option in given:
            if FIELDS[option] not in known:
                raise ValueError(f"{terminal.flag(option)} does not apply to {name}, which has no such thing")
        return models.config(name, **changes), []
    missing = [terminal.flag(option) for option in ("layers", "d_model", "heads") if option not in given]
    if missing:
        raise ValueError(f"give the name of a configuration (regard models lists them), or {', '.join(missing)} too")
    assumed: dict[str, Any] = {
        "ff_dim": 4 * given["d_model"],
        "vocab_size": WORDS,
        "activation": "silu" if given.get("gated") else "gelu",
        "max_tokens": 1024 if length is None else max(length, 1),
    }
    usual: dict[str, Any] = {
        "positions": "rotary", "norm": "rms", "qkv_bias": False, "out_bias": False, "ff_bias": False, "tied": True,
    }  # fmt: skip
    notes = ["rotary positions, RMS norms, no biases, and an output layer that is the token embedding"]
    if "ff_dim" not in given:
        notes.insert(0, f"a feed-forward of {assumed['ff_dim']} (--ff-dim)")
    if "vocab" not in given:
        notes.insert(0, f"{WORDS} words (--vocab)")
    return models.DecoderConfig(**usual | assumed | changes), [f"assumed: {'; '.join(notes)}"]


def _latent(config: Any, typed: dict[str, Any]) -> zoo.LatentConfig | None:
    from regard import models

    if typed["latent"] is None:
        _refuse(typed, ("q_latent", "rope_dim"), "needs --latent")
        return None
    heads = config.num_heads
    width = getattr(config, "head_dim", None) or config.embed_dim // heads
    return models.LatentConfig(
        embed_dim=config.embed_dim, num_heads=heads, kv_lora_rank=typed["latent"], nope_dim=width,
        rope_dim=ROPE if typed["rope_dim"] is None else typed["rope_dim"], q_lora_rank=typed["q_latent"],
    )  # fmt: skip


def _bill(name: str | None, given: dict[str, Any], typed: dict[str, Any]) -> Cost:
    from regard import cost as bills

    config, notes = _config(name, given, typed["length"])
    if typed["rolling"] and getattr(config, "window", None) is None:
        raise ValueError("--rolling is a cache of a decoder's --window; give one, such as --window 256")
    how = {argument: typed[argument] for argument in ("length", "batch", "source_length", "int8", "rolling", "sinks")}
    how |= {argument: typed[argument] for argument in ("dtype", "device") if typed[argument] is not None}
    if typed["experts"] is not None:
        how["experts"] = (typed["experts"], 2 if typed["active"] is None else typed["active"])
    found = bills.of(config, latent=_latent(config, typed), **how)
    title = name or f"a decoder of {config.num_layers} layers"
    changed = ", ".join(
        option if value is True else f"{option.replace('_', '-')} {value}" for option, value in given.items()
    )
    title += f" with {changed}" if name is not None and given else ""
    return dataclasses.replace(found, name=title, notes=(*notes, *found.notes))


def _times(bill: Cost, on: str | None) -> dict[str, Any]:
    """Seconds at a device's peak, for the pairs that the mask keeps."""
    if on is None:
        return {}
    from regard.cli.roofline import named

    device = named(on)
    rate, flops = device.rate(bill.dtype), bill.kept_flops
    seconds = {name: getattr(flops, name) / rate for name in ("forward", "backward", "recomputed")}
    return {"device": device.to_dict(), **seconds}


def _check_plot(file: Path) -> None:
    if not file.parent.is_dir():
        raise ValueError(f"--plot names the folder {file.parent}, which is not there")
    if file.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot is {str(file)!r}; expected a name that ends with {', '.join(PICTURES)}")
