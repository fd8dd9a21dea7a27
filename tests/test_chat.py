"""What continues a typed text: in the terminal, and on a page that Chromium shows."""

import http.client
import io
import json
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from tokenizer_reference import BYTES

from lmcore import cli
from lmcore.checkpoint import save_weights
from lmcore.model import TransformerLM
from lmcore.run import RunFolder


@pytest.fixture(scope="module")
def started(tiny_run, tmp_path_factory):
    """Starts a command on a run whose model has learned nothing."""
    run, commands = RunFolder(tmp_path_factory.mktemp("runs") / "r"), []
    run.begin(tiny_run, {})
    save_weights(TransformerLM(tiny_run.model), run.best_weights)

    def start(name, *options):
        words, pipe = [sys.executable, "-m", "lmcore", name, run, *options], subprocess.PIPE
        commands.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe))
        return commands[-1], commands[-1].stdout.readline().decode()

    yield start
    for command in commands:
        command.kill()
        command.communicate()


def test_chat_keeps_what_was_written_up_to_the_window_and_prints_whole_characters(monkeypatch, capsys):
    asked = []

    def generate(model, windows, settings, eot_id, on_token, num_ids):
        asked.append((BYTES.decode(windows[0]), settings.temperature, settings.seed))
        capsys.readouterr()
        for byte in "é".encode():
            on_token(0, byte)
            assert capsys.readouterr().out == ("é" if byte == 0xA9 else "")
        if len(asked) == 2:
            raise KeyboardInterrupt

    model = SimpleNamespace(config=SimpleNamespace(context_length=8))
    monkeypatch.setattr("lmcore.cli.chat.load", lambda *_: (model, BYTES))
    monkeypatch.setattr("lmcore.generate.generate", generate)
    typed = "ab\ncd\n/temperature 0.5\n/temperature -1\n\n/oops\n/reset\nx\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert cli.main(["chat", "r"]) == 0
    assert asked == [("ab", 1, 0), ("abé\ncd", 1, 1), ("bé\ncdé", 0.5, 1), ("x", 0.5, 2)]


def test_ctrl_c_ends_a_reply_and_not_the_chat(started):
    chat, banner = started("chat", "--max-new-tokens", "1000000")
    assert "it was not trained to follow instructions" in banner
    chat.stdin.write(b"Once\n")
    chat.stdin.flush()
    assert chat.stdout.read(1)
    chat.send_signal(signal.SIGINT)
    _, error = chat.communicate(b"/quit\n", timeout=60)
    assert (chat.returncode, error) == (0, b"")


@pytest.fixture(scope="module")
def page(started):
    """Address of the page."""
    pytest.importorskip("tornado", reason="needs the extra chat")
    return urlsplit(started("play")[1].strip())


def ask(page, method="POST", target=None, headers=None, **request):
    """Status and lines of the answer."""
    connection = http.client.HTTPConnection(page.netloc, timeout=60)
    body = json.dumps({"prompt": "Once", "max_new_tokens": 3} | request)
    connection.request(method, target or f"/?{page.query}", body, headers or {})
    return connection.getresponse()


def test_only_who_has_the_address_gets_an_answer_and_within_bounds(page):
    assert page.hostname == "127.0.0.1"
    lines = [json.loads(line) for line in ask(page).read().splitlines()]
    assert [[drawn for *_, drawn in line["candidates"]].count(True) for line in lines] == [1, 1, 1]
    assert all(0 < p <= 1 for line in lines for _, p, *_ in line["candidates"])
    for method in ("GET", "POST"):
        for refused in (
            {"target": "/"},
            {"target": "/?token=x"},
            {"headers": {"Host": f"evil.example:{page.port}"}},
            {"headers": {"Origin": "http://evil.example"}},
        ):
            assert ask(page, method, **refused).status == 403
    for wrong in (
        {"max_new_tokens": 1001},
        {"prompt": "a" * 70_000},
        {"prompt": 5},
        {"top_p": 2},
        {"prompt": "x" * 99},
    ):
        assert ask(page, **wrong).status == 400
    for _ in range(20):  # a random model may end a text at once
        first = ask(page, max_new_tokens=1000)
        assert first.readline()
        second = ask(page).status  # while the first is at work
        first.read()
        if second == 503:
            return
    raise AssertionError("two were answered at a time")


def test_chromium_shows_tokens_with_their_probabilities(page):
    api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as play:
        browser, problems = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"]), []
        shown = browser.new_page()
        shown.on("console", lambda message: problems.append(message.text))
        shown.on("pageerror", lambda error: problems.append(str(error)))
        shown.goto(page.geturl())
        shown.locator("[name=max_new_tokens]").fill("20")
        shown.locator("[name=top_k]").fill("2")
        shown.locator("button").click()
        shown.wait_for_selector("button:enabled")
        tokens = shown.locator("#text span")
        assert 1 <= tokens.count() <= 20
        tokens.first.hover()
        assert shown.locator("tbody tr").count() == 10
        assert shown.locator("tbody .cut").count() == 8
        assert "%" in shown.locator("tbody .drawn").inner_text()
        assert problems == []
