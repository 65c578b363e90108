"""What follows from attention: where a token's information comes from, and what cutting an edge would change.

_collect     one forward pass of a model, with every attention call it makes
_rollout     attention rollout: one token's row, or a pooled map, never the product of whole matrices
_attribute   the effect of cutting each edge on a scalar of the output, from one forward and one backward pass
"""

from __future__ import annotations

from regard.attributing._attribute import Attribution, Edge, LayerEffects, attribute
from regard.attributing._rollout import rollout

__all__ = ["Attribution", "Edge", "LayerEffects", "attribute", "rollout"]
