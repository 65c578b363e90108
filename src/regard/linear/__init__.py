"""Linear attention: feature maps, state and plan of the call ``regard.linear_attention``."""

from __future__ import annotations

from regard.linear._call import explain_linear as explain
from regard.linear._call import linear_attention
from regard.linear._features import RandomFeatures
from regard.linear._plan import LinearPlan
from regard.linear._state import LinearState

__all__ = ["LinearPlan", "LinearState", "RandomFeatures", "explain", "linear_attention"]
