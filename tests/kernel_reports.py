"""What the tests of notebook 07's tables and figures share: a cell's record, and what is written in a figure."""

from matplotlib.backends.backend_agg import FigureCanvasAgg

from lmcore.config import to_dict


def record(name, config, result, outcome="complete", reason=None):
    return {
        "cell": name, "config": to_dict(config), "outcome": outcome, "reason": reason, "result": result,
        "environment": {"device": "CPU"},
    }  # fmt: skip


def drawn(figure):
    """Draws the figure and returns its texts; no annotation is cut off by the figure's edge."""
    FigureCanvasAgg(figure).draw()
    for text in (text for axes in figure.axes for text in axes.texts if text.get_text()):
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
    texts = [text for axes in figure.axes for text in (*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels())]
    return [text.get_text() for text in texts]
