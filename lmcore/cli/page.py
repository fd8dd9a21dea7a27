"""The page of `lmcore play`: for who has the token of its address, on this machine, one text at a time."""

import asyncio
import hmac
import json
import secrets
from codecs import getincrementaldecoder
from pathlib import Path
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.iostream import StreamClosedError
from tornado.netutil import bind_sockets
from tornado.web import Application, HTTPError, RequestHandler

from lmcore.config import GenerateConfig, from_dict
from lmcore.errors import UserError, require
from lmcore.generate import generate
from lmcore.sampling import next_token_distribution

MOST_BYTES, MOST_TOKENS, CANDIDATES = 64 * 1024, 1000, 10
"""Of a request; of a text; likeliest tokens shown beside the one that was drawn."""


class Page(RequestHandler):
    """GET: the page; POST: a prompt and the fields of a `GenerateConfig`, answered by a line of JSON for each token."""

    def prepare(self) -> None:
        """Refuses whoever lacks the token, and requests through the name or from the page of another site."""
        origin, token = self.settings["origin"], self.get_query_argument("token", "").encode()
        ours = f"http://{self.request.host}" == self.request.headers.get("Origin", origin) == origin
        if not (hmac.compare_digest(token, self.settings["token"].encode()) and ours):
            raise HTTPError(403)

    def get(self) -> None:
        self.render("page.html", nonce=secrets.token_urlsafe(), run=self.settings["run"], most_tokens=MOST_TOKENS)

    async def post(self) -> None:
        busy: asyncio.Lock = self.settings["busy"]
        if busy.locked():
            self.set_status(503)
            return await self.send({"error": "Another text is being generated: try again when it ends."})
        async with busy:
            try:
                await asyncio.to_thread(self.continue_prompt, asyncio.get_running_loop())
            except (ValueError, RecursionError) as error:
                self.set_status(400)
                await self.send({"error": str(error)})
            except StreamClosedError:
                pass  # nobody reads any more

    async def send(self, line: dict[str, Any]) -> None:
        self.write(json.dumps(line) + "\n")
        await self.flush()

    def continue_prompt(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sends each token with the likeliest ones: their probability in the model, and in what it is drawn from."""
        model, codec, request = self.settings["model"], self.settings["codec"], json.loads(self.request.body)
        require(isinstance(request, dict) and isinstance(request.get("prompt"), str), "The request has no prompt.")
        prompt, config = codec.encode(request.pop("prompt")), from_dict(GenerateConfig, request)
        require(config.max_new_tokens <= MOST_TOKENS, f"A text has at most {MOST_TOKENS} tokens.")
        decode, distributions = getincrementaldecoder("utf-8")("replace").decode, []

        def on_logits(logits: Any) -> None:
            (p, ids), (q, _) = (next_token_distribution(logits, each) for each in (GenerateConfig(), config))
            distributions[:] = zip(ids[0].tolist(), p[0].tolist(), q[0].tolist(), strict=True)

        def on_token(_: int, token: int) -> None:
            drawn = [entry for entry in distributions[CANDIDATES:] if entry[0] == token]
            shown = [
                (codec.decode_bytes([id]).decode("utf-8", "backslashreplace"), p, q, id == token)
                for id, p, q in distributions[:CANDIDATES] + drawn
            ]
            line = {"text": decode(codec.decode_bytes([token])), "candidates": shown}
            asyncio.run_coroutine_threadsafe(self.send(line), loop).result()  # waits for a slow reader

        generate(model, [prompt], config, codec.eot_id, on_token, codec.vocab_size, on_logits)


def serve(model: Any, codec: Any, run: Path, port: int) -> int:
    """Prints the page's address and serves it until the process is stopped."""

    async def main() -> None:
        try:
            sockets, token = bind_sockets(port, "127.0.0.1"), secrets.token_urlsafe()
        except OSError as error:
            raise UserError(f"--port {port} cannot be used ({error}); leave it out to have a free one.") from None
        origin = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        own = {"token": token, "origin": origin, "model": model, "codec": codec, "run": run, "busy": asyncio.Lock()}
        quiet = {"log_function": lambda handler: None}  # a log would have the token
        HTTPServer(Application([("/", Page)], **own, **quiet), max_body_size=MOST_BYTES).add_sockets(sockets)
        print(f"{origin}/?token={token}", flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
    return 0
