"""The kernels run here on Triton's interpreter, which must be chosen before Triton is loaded: in a process of its own.

``test_interpreted.py`` starts that process; the tests it runs are collected only there, or where there is a GPU.
"""

from __future__ import annotations

import importlib.util
import os

collect_ignore = []
if importlib.util.find_spec("triton") is None:
    collect_ignore = ["test_interpreted.py", "test_kernels.py", "test_top.py"]
elif os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore = ["test_interpreted.py"]
else:
    collect_ignore = ["test_kernels.py", "test_top.py"]
