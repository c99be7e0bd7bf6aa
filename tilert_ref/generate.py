"""`tilert-ref generate DIR --prompt ...`: the engine alone, prefill included, from text to text."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tilert_ref.engine.api import Finished, SamplingParams
from tilert_ref.engine.ref import COMPILE_HELP, RefEngine, load_engine
from tilert_ref.model_files import ConfigError, InputError, present, read_json, read_text, says_bad_input, shown
from tilert_ref.router.detokenize import read_tokenizer


@says_bad_input
def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    prompt = _prompt_ids(args)
    engine = load_engine(
        args.model_dir,
        device=args.device,
        max_seq_len=args.max_seq_len,
        num_mtp=args.num_mtp,
        kv_cache_dtype=args.kv_cache_dtype,
        compile=args.compile,
        progress=lambda line: print(line, file=sys.stderr),
    )
    return _generate(engine, prompt, args)


def render_chat(model_dir: Path, messages: list[dict[str, str]]) -> str:
    """The checkpoint's own chat template, with the generation prompt added. Raises ConfigError, ValueError."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    path, beside = model_dir / "tokenizer_config.json", model_dir / "chat_template.jinja"
    config = read_json(path)
    template, where = config.get("chat_template"), f"{path}: chat_template"
    if present(beside):
        template, where = read_text(beside), str(beside)
    if not template:
        raise InputError(f"{model_dir} has no chat template; use --prompt without --chat")
    if not isinstance(template, str):
        raise ConfigError(f"{where} = {shown(template)}, legal: a string")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    special = {key: config[key] for key in ("bos_token", "eos_token", "pad_token") if isinstance(config.get(key), str)}
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **special)
    except Exception as error:  # a template is a program of its own: it may raise anything
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{where}: {said}, legal: a Jinja template that renders a user's message") from error


def stream(engine: RefEngine, prompt: Sequence[int], sampling: SamplingParams, max_tokens: int) -> Iterator[list[int]]:
    """Prefills and yields the ids of each decode step, then returns; `Finished` is the generator's return value."""
    first = engine.prefill(prompt, sampling)
    for event in engine.decode(first, max_tokens, sampling):
        if isinstance(event, Finished):
            return event
        yield [token.id for token in event]
    raise RuntimeError("the engine ended without a finish event")


def _generate(engine: RefEngine, prompt: list[int], args: argparse.Namespace) -> int:
    path = args.model_dir / "tokenizer.json"
    tokenizer = read_tokenizer(path) if present(path) else None  # without one the ids are the answer
    sampling = SamplingParams(args.temperature, args.top_p, args.top_k, args.ignore_eos, args.seed)
    ids, shown, start = list[int](), "", time.perf_counter()
    finished = None
    steps = stream(engine, prompt, sampling, args.max_tokens)
    while finished is None:
        try:
            ids += next(steps)
        except StopIteration as stop:
            finished = stop.value
        text = tokenizer.decode(ids) if tokenizer else ""
        if finished or not text.endswith("\ufffd"):
            print("".join(c if c.isprintable() or c == "\n" else "·" for c in text[len(shown) :]), end="", flush=True)
            shown = text
    print("\n" + (f"ids: {ids}\n" if args.ids or tokenizer is None else ""), end="")
    seconds = time.perf_counter() - start
    stats = "".join(f", {key} {value}" for key, value in finished.stats.items())
    line = f"{len(prompt)} prompt tokens, {len(ids)} generated in {seconds:.2f} s, finish {finished.reason}{stats}"
    print(line, file=sys.stderr)
    return 0


def _prompt_ids(args: argparse.Namespace) -> list[int]:
    if args.prompt_ids is not None:
        words = args.prompt_ids.replace(",", " ").split()
        if wrong := [word for word in words if not (word.isascii() and word.isdigit())]:
            raise InputError(f"--prompt-ids has {shown(wrong[0])}, legal: token ids separated by commas or spaces")
        return [int(word) for word in words]
    if not args.model_dir.is_dir():
        raise FileNotFoundError(f"{args.model_dir} is not a directory: a Hugging Face checkpoint is expected")
    path = args.model_dir / "tokenizer.json"
    if not present(path):
        raise FileNotFoundError(f"{path} not found; give token ids with --prompt-ids")
    text = render_chat(args.model_dir, [{"role": "user", "content": args.prompt}]) if args.chat else args.prompt
    return read_tokenizer(path).encode(text, add_special_tokens=not args.chat).ids


def _within(kind: type, low: float, high: float) -> Callable[[str], float]:
    """An argparse type: a number of this kind from low to high."""

    def read(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}, legal: {low:g} to {high:g}")
        return value

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilert-ref generate",
        description="Generate with the engine alone: no vLLM, no handoff. Greedy unless --temperature says otherwise.",
        epilog="example: tilert-ref make-tiny --arch dsv3 T && tilert-ref generate T --chat --prompt hi",
    )
    parser.add_argument("model_dir", type=Path, help="Hugging Face checkpoint directory (config.json, safetensors)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="prompt text")
    source.add_argument("--prompt-ids", help="prompt as token ids, separated by commas or spaces")
    parser.add_argument("--chat", action="store_true", help="wrap --prompt into the checkpoint's chat template")
    tokens, temperature, seed = _within(int, 1, 2**31), _within(float, 0, 100), _within(int, 0, 2**63 - 1)
    parser.add_argument("--max-tokens", type=tokens, default=64, help="tokens to generate (default 64)")
    parser.add_argument("--temperature", type=temperature, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=_within(float, 0, 1), default=1.0)
    parser.add_argument("--top-k", type=_within(int, 0, 2**31), default=0, help="0: no limit")
    parser.add_argument("--seed", type=seed, help="makes sampling repeatable")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past stop tokens")
    parser.add_argument("--num-mtp", type=int, default=0, choices=range(4), help="drafts a step; 0: none (default)")
    parser.add_argument("--max-seq-len", type=int, default=4096, help="prompt and answer together (default 4096)")
    parser.add_argument("--kv-cache-dtype", default="bf16", help="bf16 (default), or fp8 for a sparse model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help=COMPILE_HELP)
    parser.add_argument("--ids", action="store_true", help="print the generated token ids too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
