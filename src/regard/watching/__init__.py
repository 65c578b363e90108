"""How ``regard.watch`` sees the attention of any model while it runs.

_block         the ``with`` block, and its warnings when it ends
_watcher       one watch: which modules run, which calls they make, what is recorded
_operators     where attention is found: torch's operators, as they run
_fused         fused attention kernels as calls in regard's terms
_written       a softmax and the product that follows; _exponentials: the ways in which code takes a softmax
_output        what weights and values are multiplied into, which shows the heads
_scores        products of queries and keys before that; _chunks: calls of some of the queries each
_effects       what operators that are neither views nor products make of weights
_axes, _layout which axis of the weights is batch, head, query, key
_seen          a call given by query, key and value; _in_memory: one given by its weights
_modules       the modules under way; _padding: which queries are padding, by what those were told
_caches        the tokens that a cache has seen; _packed: heads that a function hands over as queries
_around        what operators do not say: regard's own calls, foreign kernels, compiled code
"""

from __future__ import annotations

from regard.watching._block import watch

__all__ = ["watch"]
