"""Models of timm, torchvision, x-transformers and vit-pytorch under `regard.watch`; those that are installed.

python -m tests.watching.zoo.libraries
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.watching.zoo.run import Row, line, seen_by_watch, summary, time_limit

TIMM = (
    "vit_tiny_patch16_224", "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256",
    "hiera_tiny_224", "nest_tiny_jx", "mvitv2_tiny", "pvt_v2_b0", "twins_svt_small", "maxvit_pico_rw_256", "levit_128s",
    "cait_xxs24_224", "crossvit_tiny_240", "beit_base_patch16_224", "eva02_tiny_patch14_224", "tnt_s_patch16_224",
    "coat_tiny", "xcit_nano_12_p16_224", "pit_ti_224", "visformer_tiny", "mobilevit_xxs", "edgenext_xx_small",
    "efficientformer_l1", "davit_tiny", "gcvit_xxtiny", "samvit_base_patch16_224", "sequencer2d_s", "volo_d1_224",
)  # fmt: skip
TORCHVISION = ("vit_b_32", "swin_t", "swin_v2_t", "maxvit_t")


def models() -> Iterator[tuple[str, Callable[[], tuple[Any, tuple[Any, ...]]]]]:
    torchvision = _torchvision()
    for name in TORCHVISION if torchvision else ():
        yield (
            f"torchvision {name}",
            lambda name=name: (
                getattr(torchvision.models, name)(weights=None),
                (torch.randn(1, 3, 224, 224),),
            ),
        )
    for name in TIMM if torchvision and importlib.util.find_spec("timm") else ():
        for fused in (True, False):
            yield f"timm {name}{'' if fused else ' unfused'}", lambda name=name, fused=fused: _timm(name, fused)
    yield from _x_transformers()
    yield from _vit_pytorch()


def _torchvision() -> Any:
    """The package, also where it was built for CUDA and cannot load its kernels: attention needs none of them."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            _DECLARED.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        return importlib.import_module("torchvision")


_DECLARED = torch.library.Library("torchvision", "FRAGMENT")


def _timm(name: str, fused: bool) -> tuple[Any, tuple[Any, ...]]:
    import timm

    timm.layers.set_fused_attn(fused)
    model = timm.create_model(name, pretrained=False)
    return model, (torch.randn(1, *model.default_cfg["input_size"]),)


def _x_transformers() -> Iterator[tuple[str, Callable[[], tuple[Any, tuple[Any, ...]]]]]:
    try:
        from x_transformers import Decoder, Encoder, TransformerWrapper, XTransformer
    except ImportError:
        return
    ids = torch.randint(0, 99, (2, 13))

    def text(layers: Any) -> tuple[Any, tuple[Any, ...]]:
        return TransformerWrapper(num_tokens=99, max_seq_len=64, attn_layers=layers), (ids,)

    sizes = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8}
    yield "x-transformers Encoder", lambda: text(Encoder(**sizes))
    yield "x-transformers Decoder", lambda: text(Decoder(**sizes))
    yield "x-transformers Decoder, flash", lambda: text(Decoder(**sizes, attn_flash=True))
    yield "x-transformers Decoder, one kv head", lambda: text(Decoder(**sizes, attn_one_kv_head=True))
    yield "x-transformers Decoder, memory", lambda: text(Decoder(**sizes, attn_num_mem_kv=3))
    yield "x-transformers Decoder, ALiBi", lambda: text(Decoder(**sizes, alibi_pos_bias=True, alibi_num_heads=4))
    yield "x-transformers Decoder, talking heads", lambda: text(Decoder(**sizes, attn_pre_talking_heads=True))
    both = {"enc_num_tokens": 99, "dec_num_tokens": 99, "enc_max_seq_len": 64, "dec_max_seq_len": 64}
    depths = {"enc_depth": 1, "dec_depth": 2, "enc_heads": 4, "dec_heads": 4}
    yield "x-transformers XTransformer", lambda: (XTransformer(dim=32, **both, **depths), (ids, ids[:, :7]))


def _vit_pytorch() -> Iterator[tuple[str, Callable[[], tuple[Any, tuple[Any, ...]]]]]:
    if _torchvision() is None or importlib.util.find_spec("vit_pytorch") is None:
        return
    import vit_pytorch
    from vit_pytorch import cct, cross_vit, deepvit, max_vit, simple_vit

    image = (torch.randn(2, 3, 64, 64),)
    sizes = {"image_size": 64, "patch_size": 16, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48}
    yield "vit-pytorch ViT", lambda: (vit_pytorch.ViT(**sizes), image)
    yield "vit-pytorch SimpleViT", lambda: (simple_vit.SimpleViT(**sizes), image)
    yield "vit-pytorch DeepViT", lambda: (deepvit.DeepViT(**sizes), image)
    yield "vit-pytorch CCT", lambda: (cct.CCT(img_size=64, embedding_dim=32, num_layers=2, num_heads=4), image)
    yield (
        "vit-pytorch MaxViT",
        lambda: (
            max_vit.MaxViT(num_classes=5, dim_conv_stem=16, dim=16, dim_head=8, depth=(1, 1), window_size=4),
            image,
        ),
    )
    both = {"sm_dim": 32, "sm_patch_size": 16, "lg_dim": 32, "lg_patch_size": 32, "num_classes": 5, "depth": 1}
    yield "vit-pytorch CrossViT", lambda: (cross_vit.CrossViT(image_size=64, **both), image)


def main() -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for name, make in models():
        try:
            with time_limit(60), torch.no_grad():
                torch.manual_seed(0)
                model, inputs = make()
                row = seen_by_watch(name, model.eval(), inputs, {})
        except Exception as error:
            row = Row(name, "", f"{type(error).__name__}: {str(error).strip()[:110]}")
        rows.append(row)
        print(line(row), flush=True)
    summary(rows)  # these have classes that mix heads after the softmax, which are listed
    return int(any(row.unseen or row.inexact or not row.bitwise for row in rows if not row.problem))


if __name__ == "__main__":
    raise SystemExit(main())
