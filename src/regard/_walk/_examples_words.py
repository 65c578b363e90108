"""What the worked examples say, in English and in Chinese: ``examples.json``, which the page is built with too."""

from __future__ import annotations

import json
from importlib.resources import files

from regard._display.texts import Catalogue

EXAMPLES: Catalogue = {
    name: (english, chinese)
    for name, (english, chinese) in json.loads(
        files("regard._walk").joinpath("examples.json").read_text(encoding="utf-8")
    ).items()
}
