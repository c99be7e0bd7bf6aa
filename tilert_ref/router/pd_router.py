"""Command line of the router: `python -m tilert_ref.router.pd_router`. Flags and defaults are TileRT's, plus a few."""

import argparse
import logging
import os
from collections.abc import Sequence

import uvicorn

from tilert_ref.http_limits import uvicorn_limits
from tilert_ref.router.app import Config, create_app
from tilert_ref.router.detokenize import Detokenizer, load_detokenizer
from tilert_ref.router.grammars import GRAMMARS
from tilert_ref.router.parsing import choose_parsing
from tilert_ref.router.pool import Node, parse_node
from tilert_ref.router.request import sampling_defaults

log = logging.getLogger("tilert_ref.router")  # not __name__, which is __main__ for the program

_DESCRIPTION = """\
The OpenAI-compatible front door of a prefill/decode pair. For each request it

  1. checks every field (unknown or unsupported ones are refused by name),
  2. takes a free decode node, or queues, or answers 429,
  3. posts the prompt to vLLM with max_tokens=1 and tells vLLM's connector where the KV goes,
  4. asks the decode node for the tokens and turns them into text, reasoning and tool calls.

It loads no model and needs neither torch nor vLLM. vLLM renders the chat template. vLLM has to run with the
TileRTConnector (tilert_ref.connector.prefill_connector); see docs/structures.md."""

_EPILOG = """\
example, everything on one machine:
  python -m tilert_ref.router.pd_router --host 127.0.0.1 --vllm-url http://127.0.0.1:8000 \\
      --decode 127.0.0.1:5556:5557 --model-path /models/GLM-5 --port 23333
  curl -s http://127.0.0.1:23333/v1/completions -d '{"prompt": "Hello", "max_tokens": 8}'

two decode nodes and a queue:
  ... --decode node1:5556:5557 node2:5556:5557 --queue-timeout 30

GET /health says what is down and why, GET /pool_status which nodes are busy.
`python -m tilert_ref.router.fields` prints every request field and what happens to it."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "pd_router", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_peers(parser.add_argument_group("peers"))
    _add_text(parser.add_argument_group("text and sampling"))
    _add_limits(parser.add_argument_group("limits, in seconds where nothing is said"))
    return parser


def _add_peers(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--vllm-url", required=True, help="the prefill vLLM, e.g. http://127.0.0.1:8000")
    group.add_argument(
        "--decode", required=True, nargs="+", type=_node, metavar="HOST:CTRL:HTTP",
        help="decode nodes, in order of preference. HOST is also where vLLM sends the KV, so it has to be right from "
        "vLLM's point of view; CTRL is the node's control port (5556), HTTP its HTTP port (5557)",
    )  # fmt: skip
    group.add_argument(
        "--host", default="0.0.0.0",
        help="address to listen on (default %(default)s, as in TileRT: every interface, without authentication; "
        "127.0.0.1 keeps it on this machine)",
    )  # fmt: skip
    group.add_argument("--port", type=int, default=23333, help="port to listen on (default %(default)s)")


def _add_text(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model-path", default="",
        help="checkpoint directory: tokenizer.json (text) and generation_config.json (sampling defaults). Without it "
        "answers carry token ids and null text",
    )  # fmt: skip
    group.add_argument(
        "--generation-config", choices=("auto", "vllm"), default="auto",
        help="auto (default): sampling defaults from <model-path>/generation_config.json; vllm: neutral ones",
    )  # fmt: skip
    for name, kind in (("temperature", float), ("top-p", float), ("top-k", int), ("repetition-penalty", float)):
        group.add_argument(f"--default-{name}", type=kind, help="overrides that default")
    group.add_argument(
        "--force-include-usage", action="store_true", help="every stream ends with a usage chunk, asked for or not"
    )
    group.add_argument(
        "--parser", choices=("auto", "none", *GRAMMARS), default="auto",
        help="splits chat answers into reasoning_content, content and tool_calls; without it all is content and tools "
        "are refused. glm47: GLM-4.5 to GLM-5 (TileRT's default); dsv32: DeepSeek-V3.2; auto (default): the one whose "
        "tokens (<think>, <arg_key>, ... or ｜DSML｜) tokenizer.json has, else none. For tools, vLLM has to run with "
        "--enable-auto-tool-choice and its own --tool-call-parser",
    )  # fmt: skip
    unused = "accepted so that TileRT's command lines work; no effect, because "
    group.add_argument("--model", default="", help=unused + "no published profile allows penalties")
    group.add_argument("--chat-template", help=unused + "vLLM renders every prompt: give it to vLLM")
    group.add_argument("--default-chat-template-kwargs", help=unused + "vLLM renders every prompt: give it to vLLM")


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--queue-timeout", type=_seconds, default=0.0, help="wait for a free node; 0 (default): fail at once"
    )
    group.add_argument(
        "--no-prefetch", dest="prefetch", action="store_false",
        help="never send a request to a busy node. By default one with a receive slot left gets it, so that it starts "
        "the moment the node is free; only when all slots are taken are requests refused or made to wait",
    )  # fmt: skip
    group.add_argument(
        "--announce-timeout", type=_positive, default=20.0,
        help="wait of the node for a prefill node to offer the prompt's KV, while none sends it any (default "
        "%(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--kv-timeout", type=_positive, default=120.0, help="wait of the node for the prompt's KV (default %(default)g)"
    )
    group.add_argument(
        "--stall-timeout",
        type=_positive,
        default=120.0,
        help="longest silence of a decoding node (default %(default)g)",
    )
    group.add_argument(
        "--request-timeout", type=_positive, default=os.environ.get("TILERT_PD_HTTP_TIMEOUT_S", "3600"),
        help="longest time for a whole request (default: $TILERT_PD_HTTP_TIMEOUT_S or 3600)",
    )  # fmt: skip
    group.add_argument(
        "--max-body-mb", type=_positive, default=64.0, help="largest request body in MiB (default %(default)g)"
    )
    group.add_argument(
        "--max-connections", type=_places, metavar="N", default=1024,
        help="open client connections; then the oldest that has sent no whole header goes (default %(default)s)",
    )  # fmt: skip


def _node(text: str) -> Node:
    try:
        return parse_node(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"has to be a number >= 0, got {text}")
    return value


def _places(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**20:
        raise argparse.ArgumentTypeError(f"has to be an integer from 1 to {2**20 - 1}, got {text}")
    return int(text)


def _positive(text: str) -> float:
    value = _seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError("has to be above 0")
    return value


def config_from(args: argparse.Namespace) -> Config:
    """Raises ValueError for flags or files that don't go together."""
    if not args.vllm_url.startswith(("http://", "https://")):
        raise ValueError(f"--vllm-url has to start with http:// or https://, got {args.vllm_url}")
    overrides = {
        name: getattr(args, f"default_{name}") for name in ("temperature", "top_p", "top_k", "repetition_penalty")
    }
    detokenizer = _detokenizer(args.model_path)
    return Config(
        vllm_url=args.vllm_url,
        nodes=args.decode,
        detokenizer=detokenizer,
        parsing=choose_parsing(args.parser, detokenizer),
        defaults=sampling_defaults(args.model_path, args.generation_config, overrides),
        queue_timeout_s=args.queue_timeout,
        prefetch=args.prefetch,
        kv_timeout_s=args.kv_timeout,
        announce_timeout_s=args.announce_timeout,
        stall_timeout_s=args.stall_timeout,
        request_timeout_s=args.request_timeout,
        max_body_bytes=int(args.max_body_mb * 2**20),
        force_include_usage=args.force_include_usage,
    )


def _detokenizer(model_path: str) -> Detokenizer | None:
    return load_detokenizer(model_path) if model_path else None


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        config = config_from(args)
    except ValueError as e:
        parser.error(str(e))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every health probe
    log.info("parser: %s", config.parsing.grammar.name if config.parsing else "none")
    # A client that streams for minutes must not keep a stopped router alive.
    limits = uvicorn_limits(args.max_connections)
    app = create_app(config)
    uvicorn.run(app, host=args.host, port=args.port, access_log=False, timeout_graceful_shutdown=5, **limits)


if __name__ == "__main__":
    main()
