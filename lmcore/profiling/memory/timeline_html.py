"""The active memory timeline as one HTML file that needs nothing else: no network, no library."""

import html
import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from lmcore.errors import require
from lmcore.files import atomic_write
from lmcore.profiling.cases import MODES

CATEGORY_COLORS = {
    "parameters": "#0173b2",
    "optimizer state": "#56b4e9",
    "other": "#949494",
    "gradients": "#de8f05",
    "activations": "#029e73",
    "temporary": "#cc78bc",
    "unknown": "#ca9161",
}
"""One color for a category in every figure, told apart also by color-blind readers."""

DETAIL = 30
"""Percentage of the listed allocations that are drawn one by one at first, the largest."""


def write_timeline(profile: Mapping[str, Any], path: str | os.PathLike, title: str) -> Path:
    """Writes the timeline of a profile (`lmcore.profiling.memory.profile.profile_memory`) as a page for a browser.

    Stacked by category, stages and peak marked; each allocation of the profile's list says its size, category, lifetime
    and source when it is pointed at or reached by the keyboard, and the least size that is drawn can be chosen.
    Raises `UserError` for a profile without a timeline.
    """
    data = timeline_data(profile)
    # "<" could close the script element that holds the data
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    template = resources.files("lmcore.profiling.memory").joinpath("timeline.html").read_text(encoding="utf-8")
    values = {"@TITLE@": html.escape(title), "@SUBTITLE@": html.escape(subtitle(profile)), "@DATA@": text}
    page = re.sub("@(?:TITLE|SUBTITLE|DATA)@", lambda match: values[match[0]], template)
    with atomic_write(path, "w") as file:
        file.write(page)
    return Path(path)


def subtitle(profile: Mapping[str, Any]) -> str:
    """What was measured, on what, with which tool."""
    count, total = len(profile["allocations"]), profile["allocations_total"]
    listed = f"the {count:,} largest of {total:,} allocations" if count < total else f"all {total:,} allocations"
    return (
        f"{MODES[profile['mode']]}, {profile['precision']}, on {profile['device']}; recorded by {profile['tool']}. "
        f"The height is the sum of all allocations; {listed} can be pointed at, from "
        f"{profile['allocations_smallest_bytes'] / 1e6:,.3g} MB on."
    )


def timeline_data(profile: Mapping[str, Any]) -> dict[str, Any]:
    """What the page's script draws: the profile's timeline and allocations, with texts as numbers into lists."""
    timeline, allocations = profile["timeline"], profile["allocations"]
    require(len(timeline["event"]) > 0, "The profile has no timeline: nothing was allocated while it was recorded.")
    categories, sources = list(profile["categories"]), list(dict.fromkeys(row["source"] for row in allocations))
    number = {source: index for index, source in enumerate(sources)}
    return {
        "categories": [{"label": name, "color": CATEGORY_COLORS[name]} for name in categories],
        "events": timeline["event"],
        "bytes": [timeline["bytes"][name] for name in categories],
        "last": profile["events"],
        "peak": profile["peak_bytes"],
        "peak_event": profile["peak_event"],
        "stages": [
            {"name": stage["name"], "start": stage["first_event"], "end": stage["last_event"]}
            for stage in profile["stages"]
        ],
        "allocations": [
            [
                row["first_event"],
                row["last_event"],
                row["bytes"],
                categories.index(row["category"]),
                number[row["source"]],
                row["stage"],
                round(row["end"] - row["start"], 6),
            ]
            for row in allocations
        ],
        "sources": sources,
        "detail": DETAIL,
    }
