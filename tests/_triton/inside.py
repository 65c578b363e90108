"""The kernels' package as these tests see it: they launch kernels one by one, which nothing public does, and this one
file knows where each stands."""

from __future__ import annotations

from regard._triton import attend as attend
from regard._triton import backward as backward
from regard._triton import decode as decode
from regard._triton import decoding as decoding
from regard._triton import encode as encode
from regard._triton import form as form
from regard._triton import forward as forward
from regard._triton import gradients as gradients
from regard._triton import inputs as inputs
from regard._triton import kernels as kernels
from regard._triton import launcher as launcher
from regard._triton import observing as observing
from regard._triton import scan as scan
from regard._triton import scanning as scanning
from regard._triton import small as small
from regard._triton import stored_codes as stored_codes
from regard._triton import stored_decoding as stored_decoding
from regard._triton import tile_sizes as tile_sizes
from regard._triton import tiles as tiles
from regard._triton import top as top
from regard.backends import _stored

stored_caches = _stored  # decoding over caches as they are stored
