"""What the tests of notebook 07's tables and figures share: records, rows of speed files, and texts of a figure."""

from matplotlib.backends.backend_agg import FigureCanvasAgg

from lmcore.config import to_dict


def record(name, config, result, outcome="complete", reason=None):
    return {
        "cell": name, "config": to_dict(config), "outcome": outcome, "reason": reason, "result": result,
        "environment": {"device": "CPU"},
    }  # fmt: skip


def speed_row(row, group, contestant, ours, median, **more):
    """A row of a speed file; without a median it did not fit into the memory."""
    empty = dict.fromkeys(("rate", "rate_unit", "share", "share_of", "peak_bytes", "reason"))
    return empty | {
        "row": row, "group": group, "work": f"work of {row}", "settings": {}, "contestant": contestant, "ours": ours,
        "unit": "ms", "median": median, "low": median, "high": median, "repeats": 9,
        "outcome": "complete" if median else "out of memory", "notes": {},
    } | more  # fmt: skip


def drawn(figure):
    """Draws the figure and returns its texts; no annotation is cut off by the figure's edge."""
    FigureCanvasAgg(figure).draw()
    for text in (text for axes in figure.axes for text in axes.texts if text.get_text()):
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
    texts = [text for axes in figure.axes for text in (*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels())]
    return [text.get_text() for text in texts]
