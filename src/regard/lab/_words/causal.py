"""Texts of E5."""

WORDS = {
    "title": ("The causal mask, and the classic mistake", "因果掩码，以及那个经典错误"),
    "question": (
        "Which keys may a query see, and what happens when a mask is read the wrong way round?",
        "一个查询可以看见哪些键？掩码的含义读反了会怎样？",
    ),
    "look": (
        "Query i sees keys 0 … i: a triangle with its diagonal. Read the wrong way round, the same matrix hides the "
        "past and the token itself and shows only what comes later; the last query sees nothing, and gets zeros here "
        "(X3 shows what else it gets elsewhere, and what such a model learns).",
        "查询 i 能看见键 0 … i：一个带对角线的三角形。读反之后，同一个矩阵遮住了过去和自己，只露出后面的词元；最后一"
        "个查询什么也看不见，在这里得到 0（别处会得到什么、这样的模型会学成什么样，见 X3）。",
    ),
    "claim": (
        "A widely copied note builds the mask as triu(k=1), which is True where attention is forbidden, and then "
        "passes it where True means keep.",
        "一份流传很广的笔记用 triu(k=1) 构造掩码，True 表示“禁止”，随后却把它传给了 True 表示“保留”的接口。",
    ),
    "right": (
        "Say which it is: masks.drop(triu) permits exactly what masks.causal() permits; masks.keep(triu) is its "
        "opposite.",
        "把含义说清楚：masks.drop(triu) 与 masks.causal() 完全相同，masks.keep(triu) 则正好相反。",
    ),
    "why": (
        "Two conventions exist: True = may attend (torch's SDPA) and True = forbidden (torch.nn.MultiheadAttention). "
        "A bare tensor does not say which, so regard refuses it.",
        "两种约定并存：True 表示“可以看”（torch 的 SDPA），或 True 表示“禁止看”（torch.nn.MultiheadAttention）。光一"
        "个张量说不清是哪一种，所以 regard 拒绝接受。",
    ),
    "weights": ("weights under masks.causal()", "masks.causal() 下的权重"),
    "mistaken": ("weights when triu(k=1) is taken for what to keep", "把 triu(k=1) 误当作“保留”时的权重"),
    "key": ("key {number}", "键 {number}"),
    "query": ("query {number}", "查询 {number}"),
    "answers": ("and", "此外"),
    "drop": ("masks.drop(triu) is the causal mask", "masks.drop(triu) 就是因果掩码"),
    "future": ("weight on the future, read wrongly", "读反时落在未来的权重"),
    "bare": ("mask=triu, as a bare tensor", "mask=triu，直接传张量"),
    "refused": (
        "TypeError: a bare tensor does not say which it is",
        "TypeError：光一个张量没有说明含义；请用 masks.keep（True 表示可以看）或 masks.drop（True 表示禁止看）",
    ),
    "yes": ("yes", "是"),
    "no": ("no", "否"),
}
