"""A prefill node whose HTTP half is a double of vLLM and whose handoff is ours, over real NIXL.

The text of a request says what happens to it:

    no kv       answered, nothing is sent to the decode node
    give up     the handoff is accepted, then fails at this end
    refuse      400, as vLLM refuses
    break       500
    otherwise   its KV is handed off; the text's first word starts the request id
"""

import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import ours
import wire_case
from wire_case import Case

FIRST_LOGPROB = -0.25


class PrefillNode:
    """seq_len of every prompt is the case's, whatever it says. first_token is what vLLM would have sampled."""

    def __init__(self, case: Case, first_token: int) -> None:
        self.case, self.first_token = case, first_token
        self.made = wire_case.caches(case)
        self.bodies: list[dict[str, Any]] = []
        self._ranks = ours.prefill_node(case, self.made)
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def __enter__(self) -> "PrefillNode":
        (self.rank,) = self._ranks.__enter__()
        node = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._say(200, {"object": "list", "data": [{"id": "double", "object": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._say(*node.answer(self.path, body))

            def _say(self, status: int, body: dict[str, Any]) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._ranks.__exit__(*error)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.bodies.append(body)
        chat = path.endswith("chat/completions")
        text = body["messages"][-1]["content"] if chat else body["prompt"]
        if text == "refuse":
            return 400, {"error": {"message": "refused", "type": "BadRequestError", "param": None, "code": 400}}
        if text == "break":
            return 500, {"error": {"message": "broken", "type": "InternalServerError", "param": None, "code": 500}}
        rid = body.get("request_id") or f"{text.split()[0]}-request{next(self._numbers):04d}"
        if text != "no kv":
            self._hand_off(rid, body["kv_transfer_params"], fails=text == "give up")
        return 200, self._reply(rid, chat)

    def _hand_off(self, rid: str, target: dict[str, Any], fails: bool) -> None:
        claim = ours.claim(self.case, target["tilert_ctrl_port"], rid)
        if fails:
            return ours.give_up(self.case, claim)
        with self._lock:
            self.rank.prefill(claim)

    def _reply(self, rid: str, chat: bool) -> dict[str, Any]:
        name = f"token_id:{self.first_token}"
        top = [{"token": f"token_id:{self.first_token + k}", "logprob": FIRST_LOGPROB - k} for k in range(5)]
        usage = {"prompt_tokens": self.case.seq_len, "completion_tokens": 1, "total_tokens": self.case.seq_len + 1}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if chat:
            content = [{"token": name, "logprob": FIRST_LOGPROB, "top_logprobs": top}]
            choice |= {"message": {"role": "assistant", "content": "x"}, "logprobs": {"content": content}}
        else:
            choice |= {"text": "x", "logprobs": {"tokens": [name], "token_logprobs": [FIRST_LOGPROB]}}
        kind = ("chatcmpl", "chat.completion") if chat else ("cmpl", "text_completion")
        head = {"id": f"{kind[0]}-{rid}", "object": kind[1], "created": 1700000000, "model": "double"}
        return head | {"choices": [choice], "usage": usage}
