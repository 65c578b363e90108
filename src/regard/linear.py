"""Linear attention beside the call ``regard.linear_attention``: its feature maps, its state, its plan."""

from __future__ import annotations

from regard._linear.call import explain_linear as explain
from regard._linear.call import linear_attention
from regard._linear.features import RandomFeatures
from regard._linear.plan import LinearPlan
from regard._linear.state import LinearState

__all__ = ["LinearPlan", "LinearState", "RandomFeatures", "explain", "linear_attention"]
