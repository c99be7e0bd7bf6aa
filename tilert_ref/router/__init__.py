"""The OpenAI-compatible front door: validates, prefills on vLLM, decodes on a decode node, turns token ids into text.

Imports neither torch nor vLLM nor transformers: the router runs on any small machine.

- `fields`: the one table of request fields, validator and documentation at once.
- `request`, `prefill`, `pool`, `decode`, `detokenize`, `replies`: the steps of one request, in that order.
- `parser`, `grammars`: a pure state machine that splits an answer's text into channels, and the formats that it knows;
  `parsing` ties them to a tokenizer, `answer` to OpenAI's deltas.
- `app`: the HTTP surface. `pd_router`: the command line.
"""
