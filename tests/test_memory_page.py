"""The active memory timeline as a page."""

import json
import re

import pytest
from memory_profiles import training

from lmcore.errors import UserError
from lmcore.profiling.memory.timeline_html import timeline_data, write_timeline


def test_the_page_needs_nothing_from_outside(tmp_path):
    profile = training(layers=4)
    profile["allocations"][3]["source"] = "</script><b>"
    page = write_timeline(profile, tmp_path / "timeline.html", "A <title> & more").read_text(encoding="utf-8")
    assert "A &lt;title&gt; &amp; more" in page
    assert not re.search(r"@[A-Z]+@", page)
    assert not re.search(r"(?:src|href)=|https?://|import\(|fetch\(|XMLHttp", page)
    assert "default-src 'none'" in page
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(text) == timeline_data(profile)


def test_the_page_says_what_was_measured(tmp_path):
    profile = training(layers=4)
    page = write_timeline(profile, tmp_path / "timeline.html", "step").read_text(encoding="utf-8")
    total = profile["allocations_total"]
    assert "<p>A training step, fp32, on Chip A; recorded by torch.cuda memory history." in page
    assert (
        f"all {total:,} allocations can be pointed at, from {profile['allocations_smallest_bytes'] / 1e6:.3g} MB"
        in page
    )
    cut = profile | {"allocations": profile["allocations"][:5]}
    page = write_timeline(cut, tmp_path / "timeline.html", "step").read_text(encoding="utf-8")
    assert f"the 5 largest of {total:,} allocations can be pointed at" in page


def test_the_page_holds_every_allocation_and_its_lifetime():
    profile = training(layers=2)
    data = timeline_data(profile)
    assert len(data["allocations"]) == len(profile["allocations"])
    assert max(sum(values) for values in zip(*data["bytes"], strict=True)) == data["peak"] == profile["peak_bytes"]
    first, last, size, category, source, stage, seconds = data["allocations"][-1]
    assert data["categories"][category]["label"] == "temporary"
    assert data["sources"][source].startswith("lmcore/optimizer.py")
    assert (stage, seconds) == ("optimizer", pytest.approx((last - first) * 1e-3))
    assert size == profile["allocations"][-1]["bytes"]
    with pytest.raises(UserError, match="nothing was allocated"):
        timeline_data(profile | {"timeline": {"event": [], "bytes": {}, "seconds": []}})
