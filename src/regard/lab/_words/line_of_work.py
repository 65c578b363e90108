"""Texts of E14."""

WORDS = {
    "title": ("The line of work, 2017 to 2024", "一路走来：2017 至 2024"),
    "question": (
        "Attention, BERT, efficient attention, FlashAttention 2, latent attention: what did each change?",
        "注意力、BERT、高效注意力、FlashAttention 2、潜在注意力：每一步改变了什么？",
    ),
    "look": (
        "2017 made the path between any two tokens one step long. 2018 (BERT) let every token see both sides. 2020 "
        "cut the pairs: a window keeps what is near, and linear attention keeps a state of fixed size. "
        "FlashAttention 2 computes the same numbers without writing the matrix of weights, and latent attention "
        "(MLA, DeepSeek) keeps one small vector of a token in place of all heads' keys and values. Each of them "
        "runs here: `regard.attention`, `masks.everything()`, `masks.window`, `regard.linear_attention`, the fused "
        "backends and `regard.nn.LatentAttention`.",
        "2017 年让任意两个词元之间只隔一步。2018 年（BERT）让每个词元同时看到左右两边。2020 年减少配对：窗口只保留"
        "近处，线性注意力只保留固定大小的状态。FlashAttention 2 算出同样的数字，却不写出权重矩阵；潜在注意力（MLA，"
        "DeepSeek）为每个词元只保留一个小向量，代替所有头的键和值。它们都能在这里运行：`regard.attention`、"
        "`masks.everything()`、`masks.window`、`regard.linear_attention`、融合后端和 `regard.nn.LatentAttention`。",
    ),
    "line": ("what changed, at {tokens} tokens", "改变了什么（{tokens} 个词元）"),
    "what": ("what", "什么"),
    "before": ("before", "之前"),
    "after": ("after", "之后"),
    "attention": ("2017 attention", "2017 注意力"),
    "attention_what": ("steps from the first token to the last", "从首到尾的步数"),
    "bert": ("2018 BERT", "2018 BERT"),
    "bert_what": ("tokens that the first one sees", "第一个词元能看到的词元"),
    "window": ("2020 efficient: window", "2020 高效：窗口"),
    "window_what": ("pairs of query and key", "查询与键的配对"),
    "linear": ("2020 efficient: linear", "2020 高效：线性"),
    "linear_what": ("numbers kept of all tokens, a head", "为全部词元保留的数，每头"),
    "flash": ("2024 FlashAttention 2", "2024 FlashAttention 2"),
    "flash_what": ("memory at the peak, a head", "峰值内存，每头"),
    "mla": ("2024 MLA", "2024 MLA"),
    "mla_what": ("numbers kept of a token, DeepSeek-V3", "为每个词元保留的数，DeepSeek-V3"),
}
