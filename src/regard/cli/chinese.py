"""The help in Chinese: `regard --lang zh --help`, and of each command that has `--lang`."""

from __future__ import annotations

import itertools
from typing import Any

from regard._display.texts import breaks, left, width

WIDTH = 80

ABOUT = {
    "regard": "看得见的注意力。",
    "look": "用文本、图像或声音运行一个模型，打印各个头的摘要，并写出记录和网页。\n\n"
    "Hub 上的名字先在 Hugging Face 的缓存中查找，没有再下载。",
    "serve": "在本地网页上显示一个文件夹中的记录，并用网页上输入的文本查看模型。",
    "walk": "用真实的数字逐步走一遍多头注意力：从词元到输出。",
    "lab": "运行关于注意力的例题和实验：给出数字、看什么，以及笔记里错在哪里。",
    "cost": "计算一个模型的开销：参数、FLOP、激活内存、KV 缓存；或一次调用的最短时间。",
    "explain": "说明一次调用将如何运行：用哪个后端、为什么不用其他后端、开销多少。不做计算。",
    "bench": "测量一次调用在各个后端上的时间，并与 PyTorch 的 scaled_dot_product_attention 比较。",
    "info": "显示版本、设备、哪些后端能运行、其他为什么不能，以及这个 CPU 上 bfloat16 是否可用。",
    "check": "对 regard 的各个后端和其他实现运行一致性测试。",
    "models": "列出 regard.models 中有名字的配置及其大小。不加载权重。",
    "generate": "用语言模型续写一段提示，边生成边打印。",
    "convert": "以 regard 自己的格式写出模型：config.json、model.safetensors 和分词器。",
    "train": "用平行文本训练翻译模型，或用任意文本训练语言模型。",
    "translate": "翻译句子、文件或标准输入，每行一句。",
    "evaluate": "计算 sacreBLEU 与 chrF（不区分和区分大小写）及其签名，并与另一个系统比较。",
}
PANELS = {
    "Look and learn": "查看与学习",
    "Plan": "规划",
    "Prove": "验证",
    "Models": "模型",
    "Train and translate": "训练与翻译",
}
COMMON = {
    "help": "显示本帮助并退出。",
    "version": "显示版本并退出。",
    "install_completion": "为当前的 shell 安装自动补全。",
    "show_completion": "显示当前 shell 的自动补全脚本，以便复制或修改。",
    "lang": "语言：en（英文）或 zh（中文）。",
    "as_json": "以 JSON 打印全部数字。",
    "open_page": "在浏览器中打开网页。",
}
OPTIONS = {
    "look": {
        "model": "模型：Hugging Face 格式的文件夹、Hub 上的名字（gpt2、org/name）、minilm 或 smollm2。",
        "text": "让模型读的文本（默认：一段内置的短文）。",
        "file": "从这个文件读取文本；- 表示标准输入。",
        "image": "给视觉模型的图像。",
        "audio": "给语音模型的 WAV 文件。",
        "length": "词元数的上限（默认：模型的上限）。",
        "out": "输出文件的基本名：写出 NAME.regard 和 NAME.html。",
        "layer": "网页首先显示的层。",
        "head": "网页首先显示的头。",
        "cut": "切断的边，以及由此产生的差别：KEYS 或 QUERIES>KEYS，用位置、范围或词表示；只切一处时在前面加 LAYER@ 或 "
        "LAYER.HEAD@（'0:4'、'it>cat'、'3.5@-1>cat'）。可以重复。",
        "ablate": "输出置零的头：LAYER.HEAD 或 LAYER。可以重复。",
    },
    "serve": {
        "folder": "存放记录的文件夹；新的记录也存到这里。",
        "port": "本机的端口（默认：任一空闲端口）。",
    },
    "walk": {
        "text": "一段文本，或例题的名字 E1 到 E10（默认：'The cat sat on the mat.'）。",
        "heads": "头数（默认：2）。",
        "d_model": "向量的维度，必须是 --heads 的倍数（默认：8）。",
        "causal": "因果掩码：一个词元只看自己和前面的词元。",
        "window": "窗口掩码：一个词元只看两侧这么多个词元。",
        "no_scale": "分数不除以 √d_k。",
        "seed": "随机向量和矩阵的种子（默认：0）。",
        "cross": "交叉注意力：看这段文本。",
        "model": "使用训练好的权重：minilm，或文本编码器的文件夹。",
        "layer": "--model 的层，从 0 数起（默认：0）。",
        "html": "把网页写到这个文件。",
    },
    "lab": {
        "names": "E1 … E14、X1 … X5、M20、M21、S15，一个主题（例如 rnn），或 all。不给名字时列出全部。",
        "out": "把图和 JSON 写到这个文件夹；没有则新建。需要 matplotlib。",
        "kind": "--out 所写的图的格式：png 或 svg（默认：png）。",
    },
    "cost": {
        "name": "配置的名字（`regard models` 列出全部），或 attention（一次调用的时间）。不给名字时，用 --layers、"
        "--d-model 和 --heads 描述模型。",
        "length": "每条序列的词元数（默认：模型的上限）。",
        "batch": "一批中的序列数。",
        "dtype": "权重、激活和缓存的数据类型（默认：bf16；本机上的一次调用为 fp32）。",
        "source_length": "编码器-解码器中编码器读取的词元数。",
        "layers": "层数。",
        "d_model": "词元向量的维度。",
        "heads": "查询头数。",
        "kv_heads": "键值头数：1 为 MQA，--heads 的因数为 GQA。",
        "head_dim": "每个头的维度（默认：--d-model 除以 --heads）。",
        "ff_dim": "前馈网络的维度（默认：4 × --d-model）。",
        "gated": "带门控的前馈网络，三个矩阵（SwiGLU）。",
        "vocab": "词表大小（默认：32000）。",
        "window": "窗口：一个词元看前面这么多个词元。",
        "latent": "潜注意力（MLA），潜向量为这个维度。",
        "rope_dim": "与 --latent 一起：旋转键的维度（默认：64）。",
        "q_latent": "与 --latent 一起：查询的潜向量的维度。",
        "experts": "混合专家：每层有多少个 --ff-dim 的前馈网络。",
        "active": "与 --experts 一起：每个词元用几个专家（默认：2）。",
        "int8": "以 int8 存放缓存，每个数一个字节。",
        "rolling": "缓存只保留最后 --window 个词元。",
        "sinks": "与 --rolling 一起：另外保留最前面的几个词元。",
        "device": "由哪种设备的算子决定反向传播保留什么：cuda 或 cpu（默认：cuda）。",
        "on": "屋顶线所用的设备：它的峰值速度给出时间的下限。",
        "causal": "用于 attention：因果掩码。",
        "measure": "用于 attention：同时在本机上测量这次调用的时间。",
        "threads": "用于本机上的 attention：CPU 线程数。",
        "gpus": "用于 attention：把词元分到这么多个 --on 的 GPU 上；可给多个数，例如 8,64,1024。",
        "link": "与 --gpus 一起：在 8 个 GPU 的机器内，每个 GPU 接收的 GB/s。",
        "between": "与 --gpus 一起：每个 GPU 从其他机器接收的 GB/s。",
        "plot": "把开销随长度的变化画到这个文件（png、svg、pdf）。",
    },
}


def asked_for(args: list[str]) -> bool:
    """Whether these words of a command ask for Chinese."""
    return "--lang=zh" in args or ("--lang", "zh") in itertools.pairwise(args)


def has_help(context: Any) -> bool:
    """Whether a command's help is here: those are, that speak Chinese themselves."""
    return _name(context) in (*OPTIONS, "regard")


def _name(context: Any) -> str:
    return str(context.info_name) if context.parent is not None else "regard"


def page(command: Any, context: Any) -> str:
    """The help of a command, laid out here: what prints the English help breaks lines only at spaces."""
    name = _name(context)
    about = ABOUT[name].split("\n\n")
    _, _, examples = (command.help or "").partition("Examples:")
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"用法：{context.command_path} {usage}", "", *(line for part in about for line in _wrapped(part, 0)), ""]
    lines += ["示例：", *(f"  {line.strip()}" for line in examples.strip().splitlines()), ""]
    params = command.get_params(context)
    for title, kind in (("参数", "argument"), ("选项", "option")):
        rows = [(_typed(one), _said(name, one)) for one in params if one.param_type_name == kind]
        lines += [f"{title}：", *_columns(rows), ""] if rows else []
    inner = getattr(command, "commands", {})
    for panel, title in PANELS.items() if inner else ():
        rows = [(one, ABOUT[one].partition("\n")[0]) for one, its in inner.items() if its.rich_help_panel == panel]
        lines += [f"{title}：", *_columns(rows), ""]
    return "\n".join(lines)


def _typed(param: Any) -> str:
    return str(param.name) if param.param_type_name == "argument" else ", ".join(sorted(param.opts, key=len))


def _said(name: str, param: Any) -> str:
    said = OPTIONS.get(name, {}).get(param.name) or COMMON.get(param.name) or param.help or ""
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
