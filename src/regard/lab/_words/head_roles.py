"""Texts of E12."""

WORDS = {
    "title": ("What heads do", "各个头在做什么"),
    "question": (
        "Do heads of a trained model follow roles: from a verb to its subject, from a pronoun to what it means, "
        "from an adjective to its noun?",
        "训练好的模型里，头是否各有分工：从动词看向主语，从代词看向所指，从形容词看向名词？",
    ),
    "look": (
        "For each role the best of all heads is chosen by eight sentences and tried on eight others, so that luck "
        "does not count. Found is the share of these where the word gives its largest weight, among the other "
        "words, to the right one; chance is what a guess among them gets. A head that is far above both chance and "
        "the mean head has that role; it has others too, and not every role has a head.",
        "每种关系都用 8 个句子从所有头中选出最好的一个，再用另外 8 个句子检验，这样碰运气就不算数。“找到”是在这些句"
        "子中，该词在其他词里把最大权重给了正确的词的比例；“随机猜测”是在这些词里随便选一个的比例。远高于随机猜测和平均水"
        "平的头，才算有这个分工；它也可能有别的分工，而且不是每种关系都有专门的头。",
    ),
    "roles": ("{model}, {sentences} sentences for each role", "{model}，每种关系 {sentences} 个句子"),
    "head": ("best head", "最好的头"),
    "layer_head": ("layer {layer}, head {head}", "第 {layer} 层，第 {head} 头"),
    "found": ("found", "找到"),
    "chance": ("chance", "随机猜测"),
    "mean": ("all heads", "所有头"),
    "weight": ("weight", "权重"),
    "subject": ("verb → subject", "动词 → 主语"),
    "reference": ("pronoun → reference", "代词 → 所指"),
    "modifier": ("adjective → noun", "形容词 → 名词"),
}
