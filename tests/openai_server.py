"""A small OpenAI-compatible server on loopback, run as its own process: a tiny model behind it, faults on demand.

``python tests/openai_server.py MODEL`` prints its port. ``POST /faults`` with a list queues what the next requests
meet, one each; ``GET /log`` returns the requests so far and how many were answered at once. A fault is a mapping with
``kind``:

- ``status`` (``code``, ``headers``, ``body``), ``hang`` (``seconds``), ``dribble``, ``cut``, ``malformed``, ``empty``;
- ``say``: an answer of its own (``text``, ``finish``, ``usage``, ``choice``: more keys of the choice);
- ``none``: this request meets no fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = sys.argv[1] if len(sys.argv) > 1 else ""


class State:
    """What all handlers share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.faults: list[dict[str, Any]] = []
        self.log: list[dict[str, Any]] = []
        self.running: set[int] = set()
        self.most = 0
        self.engine: Any = None

    def served_model(self) -> Any:
        with self.lock:
            if self.engine is None:
                import torch

                from turntree.agents.engines.hf import HFEngine
                from turntree.agents.models import load_model

                torch.set_num_threads(1)
                self.engine = HFEngine(*load_model(MODEL))
            return self.engine


STATE = State()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: stderr belongs to tracebacks."""

    def do_GET(self) -> None:
        if self.path == "/log":
            self._send(200, {"requests": STATE.log, "most": STATE.most})
        elif self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": "tiny", "object": "model"}]})
        else:
            self._send(404, {"error": {"message": f"no {self.path}"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/faults":
            STATE.faults, STATE.log, STATE.running, STATE.most = body, [], set(), 0
            self._send(200, {})
            return
        with STATE.lock:
            fault = STATE.faults.pop(0) if STATE.faults else {"kind": "none"}
            headers = {k.lower(): v for k, v in self.headers.items()}
            STATE.log.append({"path": self.path, "body": body, "headers": headers, "at": time.monotonic()})
            STATE.running.add(id(self))
            STATE.most = max(STATE.most, len(STATE.running))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            getattr(self, f"_{fault['kind']}")(body, fault)

    # Faults

    def _status(self, body: Any, fault: dict[str, Any]) -> None:
        answer = fault.get("body", {"error": {"message": f"status {fault['code']}"}})
        self._send(fault["code"], answer, fault.get("headers", {}))

    def _hang(self, body: Any, fault: dict[str, Any]) -> None:
        time.sleep(fault["seconds"])
        self._send(200, _document(body, "late", "stop", {"prompt_tokens": 1, "completion_tokens": 1}))

    def _dribble(self, body: Any, fault: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        for _ in range(fault["times"]):
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.05)
        self.close_connection = True

    def _cut(self, body: Any, fault: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'{"choices"')
        self.close_connection = True

    def _malformed(self, body: Any, fault: dict[str, Any]) -> None:
        self._send(200, fault.get("body", "{'choices': "))

    def _empty(self, body: Any, fault: dict[str, Any]) -> None:
        self._send(200, {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 0}})

    def _say(self, body: Any, fault: dict[str, Any]) -> None:
        time.sleep(fault.get("seconds", 0))
        self._send(
            200, _document(body, fault["text"], fault.get("finish", "stop"), fault.get("usage"), fault.get("choice"))
        )

    # The model

    def _none(self, body: dict[str, Any], fault: dict[str, Any]) -> None:
        from turntree.agents.engines.protocol import Prefix, Request, SamplingParams
        from turntree.agents.tokenizer import decode, encode

        engine = STATE.served_model()
        tokenizer = engine.tokenizer
        prompt = body.get("prompt")
        if prompt is None:
            text = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
            prompt = encode(tokenizer, text, allow_special=True)
        params = SamplingParams(body["max_tokens"], body["temperature"], stop=tuple(body.get("stop", ())))
        try:
            (turn,) = engine.generate([Request(Prefix(prompt), params, seed=body.get("seed", 0))])
        except Exception as error:  # a real server answers a context that is too long in this way
            self._send(400, {"error": {"message": str(error), "code": "context_length_exceeded"}})
            return
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(turn.ids)}
        ids = [i for i in turn.ids if i not in engine.end_ids]
        text, more = decode(tokenizer, ids), None
        if "prompt" not in body and turn.stop_string:
            text = text.split(turn.stop_string)[0]  # as OpenAI does
        if body.get("return_token_ids"):
            top = {"top": _top_logprob(engine, prompt, params.temperature)}
            logprobs = {"token_logprobs": list(turn.logprobs), "top_logprobs": [top] + [{}] * (len(turn.ids) - 1)}
            more = {"token_ids": list(turn.ids), "logprobs": logprobs}
        self._send(200, _document(body, text, turn.finish_reason, usage, more))

    def _send(self, code: int, document: Any, headers: dict[str, str] | None = None) -> None:
        content = document.encode() if isinstance(document, str) else json.dumps(document).encode()
        STATE.running.discard(id(self))  # before the client can know, and ask for more
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _document(body: Any, text: str, finish: str, usage: Any, more: Any = None) -> dict[str, Any]:
    said = {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text}}
    document = {"model": body["model"], "choices": [{"index": 0, "finish_reason": finish, **said, **(more or {})}]}
    return document if usage is None else {**document, "usage": usage}


def _top_logprob(engine: Any, prompt: Sequence[int], temperature: float) -> float:
    import torch

    with torch.no_grad():
        logits = engine.model(torch.tensor([list(prompt)])).logits[0, -1].float()
    return float((logits / (temperature or 1.0)).log_softmax(-1).max())


def main() -> None:
    """Serve until the parent is gone or sends SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    threading.Thread(target=_watch_parent, daemon=True).start()
    server.serve_forever()


def _watch_parent() -> None:
    sys.stdin.read()  # ends when the tests do, however they end
    os._exit(0)


if __name__ == "__main__":
    main()
