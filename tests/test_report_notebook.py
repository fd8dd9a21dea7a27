"""What every notebook begins with, its figures, and text that must not be read as markup."""

import base64

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from IPython.display import SVG
from matplotlib.figure import Figure

from workbook.report.answers import table
from workbook.report.figures import Picture, label_ends, save_figure, use_style
from workbook.report.notebook import quote, start, token_label


def test_start_gives_results_figures_and_a_device(tmp_path, capsys):
    results, show, device = start(str(tmp_path), "laptop", device="cpu")
    figure, axes = plt.subplots()
    axes.plot([1, 2])
    picture = show(figure, "line", "A line.")
    assert picture.data.startswith("<svg")
    assert (tmp_path / "figures" / "line.svg").is_file()
    assert picture.metadata == {"caption": "A line."}
    assert not plt.get_fignums()  # or the notebook would show it twice
    assert (results.out, device.type) == (str(tmp_path), "cpu")
    assert capsys.readouterr().out.startswith("Scale laptop; cpu computes, because ")
    start(str(tmp_path), "gpu", "../results/h200")
    assert capsys.readouterr().out == "Scale gpu; results are those of h200.\n"


def test_a_quotation_cannot_be_read_as_markup():
    text = 'Hi *you* <|endoftext|> "so"... \\textbf{x} $x$ &amp; [a](b)\nline\n\n# head\x00\t'
    shown = quote(text, "heading")
    assert shown.startswith("> **heading**\n>\n> Hi ")
    pypandoc = pytest.importorskip("pypandoc")
    plain = pypandoc.convert_text(shown, "plain", format="markdown", extra_args=["--wrap=none"])
    assert "\n".join(line[2:] for line in plain.rstrip().split("\n")[2:]) == (
        'Hi *you* <|endoftext|> "so"... \\textbf{x} $x$ &amp; [a](b)\nline\n\n# head\\x00\\t'
    )


def schedule():
    """A figure as a notebook makes one."""
    use_style()
    figure = Figure(figsize=(6.6, 2.7))
    axes = figure.subplots()
    axes.plot([0, 1, 2, 3], [0.0, 1.0, 0.5, 0.0], label="cosine")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def test_a_figure_is_the_same_file_each_time_and_shown_as_it_is_saved_with_its_caption(tmp_path):
    first, second = (save_figure(schedule(), tmp_path / f"{name}.svg").read_bytes() for name in ("first", "second"))
    assert first == second
    assert b"<dc:date>" not in first
    assert b"<text" not in first  # text is drawn as paths: no font is needed to show it
    shown = Picture(tmp_path / "first.svg", "`steps` < 9.")
    data, metadata = shown._repr_svg_()
    assert data == SVG(first.decode()).data
    assert metadata == {"caption": "`steps` < 9."}
    page = shown._repr_html_()
    assert base64.b64decode(page.split("base64,")[1].partition('"')[0]).decode() == data
    assert page.endswith("<figcaption><em>Figure.</em> <code>steps</code> &lt; 9.</figcaption></figure>")


@pytest.mark.parametrize(("text", "label"), [(" the", "␣the"), ("\n", "\\n"), ("é", "é"), ("😀", "\\U0001f600")])
def test_token_labels_show_what_cannot_be_seen(text, label):
    assert token_label(text) == label


def test_names_at_the_ends_of_lines_are_apart_and_within_the_axes():
    figure, ax = plt.subplots()
    for value in (1, 900, 1000):
        ax.plot([0, 1], [1, value])
    ax.set(yscale="log")
    label_ends(ax, {"low": (1, "C0"), "lost": (float("nan"), "C3"), "high": (900, "C1"), "top": (1000, "C2")})
    places = {text.get_text(): text.xy[1] for text in ax.texts}
    plt.close(figure)
    low, high, top = places.values()
    assert [*places] == ["low", "high", "top"]
    assert low < 0.1
    assert (high, top) == pytest.approx((0.89, 1.0))


def test_columns_of_numbers_are_to_the_right():
    frame = pd.DataFrame({"size": ["small", "xl"], "time": ["12.3 ms", "out of memory"], "share": [0.5, None]})
    shown = table(frame.assign(context=["1,024", "2,048"]), share=".0%")
    assert shown.data.splitlines()[1:] == [
        "|:-------|:--------------|--------:|----------:|", "| small  | 12.3 ms       |     50% |     1,024 |",
        "| xl     | out of memory |       – |     2,048 |",
    ]  # fmt: skip
