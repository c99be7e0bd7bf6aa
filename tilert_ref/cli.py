"""`tilert-ref`: one program in front of every part. A command's module is imported only when the command runs."""

import importlib
import os
import select
import sys
from dataclasses import dataclass

from tilert_ref.model_files import InputError, is_bad_input


@dataclass(frozen=True)
class Command:
    """module:main is called with the remaining arguments and returns the exit status."""

    module: str
    help: str


COMMANDS = {
    "demo": Command("tilert_ref.demo", "run the whole path on this machine and compare every token with vLLM"),
    "make-tiny": Command("tilert_ref.engine.make_tiny", "write a tiny checkpoint of a real architecture"),
    "make-fp8": Command("tilert_ref.engine.make_fp8", "turn a bf16 checkpoint into block fp8, as published"),
    "generate": Command("tilert_ref.generate", "prefill and decode a prompt with our engine alone"),
    "scorecard": Command(
        "tilert_ref.tiny.scorecard", "score a trained tiny model: recall, skills, tools, drafts, margins"
    ),
    "verify": Command("tilert_ref.golden.verify", "hold our engine against golden files that vLLM wrote on a GPU"),
    "bench": Command("tilert_ref.bench", "measure the engine: bench decode [--against vllm]"),
    "decode-server": Command("tilert_ref.decode_server.__main__", "serve decode: receives KV, streams token ids"),
    "router": Command("tilert_ref.router.pd_router", "serve the OpenAI API over one vLLM and several decode servers"),
}

USAGE = """usage: tilert-ref COMMAND [arguments]

{commands}

`tilert-ref COMMAND --help` explains a command. A first run: `tilert-ref demo`.
By hand, three terminals and a client:
  tilert-ref make-tiny --arch dsv3 /tmp/tiny
  tilert-ref decode-server --model-weights-dir /tmp/tiny --kv-cache-dtype bf16 --senders 1 --host 127.0.0.1
  VLLM_CPU_KVCACHE_SPACE=1 python -m vllm.entrypoints.openai.api_server --model /tmp/tiny --dtype bfloat16 \\
      --max-model-len 4096 --enforce-eager --return-tokens-as-token-ids \\
      -cc.custom_ops='["all","-rotary_embedding"]' --kv-transfer-config '{{"kv_connector":"TileRTConnector",
      "kv_connector_module_path":"tilert_ref.connector.prefill_connector","kv_role":"kv_producer"}}'
  tilert-ref router --vllm-url http://127.0.0.1:8000 --decode 127.0.0.1:5556:5557 --model-path /tmp/tiny"""


def usage() -> str:
    return USAGE.format(commands="\n".join(f"  {name:<14} {c.help}" for name, c in COMMANDS.items()))


def main(argv: list[str] | None = None) -> int:
    """Runs `argv` (default: the process's) and returns the exit status; 2 for an unknown command or bad input."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        print(f"tilert-ref: unknown command {name!r}; legal: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        status = importlib.import_module(COMMANDS[name].module).main(rest) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _nobody_reads():  # another pipe's, of a program that a command started
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (InputError, OSError) as error:
        if not is_bad_input(error):
            raise
        print(f"tilert-ref {name}: error: {error}", file=sys.stderr)
        return 2


def _nobody_reads() -> bool:
    """Whether standard output is a pipe whose reader has left."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in watched.poll(0))


if __name__ == "__main__":
    sys.exit(main())
