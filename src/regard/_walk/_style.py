"""The style of the page. Colours of cells are classes: a page that forbids everything forbids inline styles too."""

from __future__ import annotations

LEVELS = 16  # shades of a colour

_CELLS = "\n".join(
    f".{letter}{level} {{ background: color-mix(in srgb, var(--{name}) {100 * level / LEVELS:g}%, var(--zero)); }}"
    for letter, name in (("a", "positive"), ("b", "negative"), ("w", "weight"))
    for level in range(LEVELS + 1)
)

STYLE = (
    """
:root { color-scheme: light dark; --ink: #1c1e26; --paper: #fff; --soft: #5b6270; --line: #d8dce4; --card: #f7f8fa;
  --accent: #0e7490; --zero: #fff; --positive: #fb923c; --negative: #60a5fa; --weight: #4ade80; --thread: #15803d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ee; --paper: #15171c; --soft: #9aa3b2; --line: #333842;
  --card: #1c1f26; --accent: #22d3ee; --zero: #1c1f26; --positive: #c2570c; --negative: #1d5fd6; --weight: #15803d;
  --thread: #4ade80; } }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, "Noto Sans SC", "PingFang SC", "Microsoft YaHei", sans-serif; color: var(--ink);
  background: var(--paper); margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .5rem; }
header p { margin: .3rem 0; color: var(--soft); max-width: 60rem; }
nav { display: flex; flex-wrap: wrap; gap: .4rem; margin: 1.2rem 0; padding: .5rem 0;
  background: var(--paper); border-bottom: 1px solid var(--line); z-index: 1; }
@media (min-width: 50rem) { nav { position: sticky; top: 0; } }
nav a { text-decoration: none; color: var(--ink); border: 1px solid var(--line); border-radius: 1rem; font-size: .85rem;
  padding: .1rem .7rem; background: var(--card); }
nav b { color: var(--accent); }
section { margin: 0 0 1.2rem; padding: 1rem 1.2rem 1.2rem; border: 1px solid var(--line); border-radius: .7rem;
  scroll-margin-top: 6rem; }
h2 { font-size: 1.2rem; margin: 0 0 .4rem; display: flex; flex-wrap: wrap; align-items: baseline; gap: .6rem; }
h2 .shape { margin-left: auto; }
h3 { font-size: 1rem; margin: 1rem 0 .2rem; }
.index { color: var(--accent); }
.shape { color: var(--soft); font-size: .85em; font-weight: 400; }
code, .formula, .worked bdi { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
.formula { margin: .2rem 0 .6rem; color: var(--accent); font-size: 1.02rem; }
section > p { max-width: 60rem; margin: .3rem 0; }
.panels { display: flex; flex-wrap: wrap; gap: 1rem 2rem; margin: .8rem 0 .4rem; align-items: flex-start; }
figure { margin: 0; min-width: 0; max-width: 100%; }
figcaption { font-weight: 600; font-size: .9rem; margin-bottom: .2rem; }
.scroll { overflow-x: auto; }
caption { text-align: left; font-weight: 600; }
table { border-collapse: collapse; font-size: .85rem; }
th { font-weight: 400; color: var(--soft); padding: .15rem .5rem; text-align: right; white-space: nowrap;
  max-width: 12rem; overflow: hidden; text-overflow: ellipsis; }
td { text-align: right; padding: .15rem .5rem; font-variant-numeric: tabular-nums; border: 1px solid var(--paper);
  font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
td.x { color: var(--soft); }
td.strip { padding: 0; }
td.strip img { width: min(60rem, 75vw); }
img { image-rendering: pixelated; display: block; max-width: 100%; }
svg text { fill: var(--ink); font-size: 14px; }
svg line { stroke: var(--thread); stroke-linecap: round; }
svg { max-width: 100%; height: auto; }
bdi { white-space: pre-wrap; }
.worked { color: var(--soft); overflow-wrap: anywhere; }
.worked b { color: var(--accent); font-weight: 600; margin-right: .4rem; }
.note { color: var(--soft); font-size: .85rem; margin: .2rem 0 0; }
.chip { border-radius: .3rem; padding: 0 .4rem; color: var(--ink); }
.chip.negative { background: var(--negative); } .chip.positive { background: var(--positive); }
.chip.weight { background: var(--weight); }
summary { cursor: pointer; color: var(--soft); }
"""
    + _CELLS
    + "\n"
)
