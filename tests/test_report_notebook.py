"""What every notebook begins with, and text that must not be read as markup."""

import matplotlib.pyplot as plt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbook.report.notebook import quote, show_source, start


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


@given(st.text(max_size=40))
def test_every_line_of_a_quotation_is_quoted(text):
    assert all(line.startswith(">") for line in quote(text, "h").split("\n"))


def test_show_source_shows_the_code_itself():
    code = show_source(quote)
    assert "def quote(" in code.data
