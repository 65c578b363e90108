"""Position encodings: some are added to the tokens, rotary ones rotate queries and keys.

Without them attention does not know order: permuting the tokens permutes its output. Biases of the logits that depend
on distance (ALiBi, T5) are in `regard.bias`.
"""

from regard.positions._absolute import LearnedPositions as LearnedPositions
from regard.positions._absolute import sinusoidal as sinusoidal
from regard.positions._rotary import Rotary as Rotary
from regard.positions._rotary import rotate as rotate
from regard.positions._scaling import DynamicNTK as DynamicNTK
from regard.positions._scaling import Linear as Linear
from regard.positions._scaling import Llama3 as Llama3
from regard.positions._scaling import Scaling as Scaling
from regard.positions._scaling import YaRN as YaRN

__all__ = ["DynamicNTK", "LearnedPositions", "Linear", "Llama3", "Rotary", "Scaling", "YaRN", "rotate", "sinusoidal"]
