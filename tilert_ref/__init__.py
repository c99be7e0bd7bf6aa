"""tilert_ref: the open decode engine that other decode engines are checked against.

Three programs around one unmodified vLLM (docs/structures.md tells a request's life):

- `tilert_ref.connector`: the plugin that vLLM loads; byte layouts, handoff protocol, transports.
- `tilert_ref.decode_server` with `tilert_ref.engine`: receives a request's KV and decodes from it.
- `tilert_ref.router`: the OpenAI-compatible front door.
"""

__version__ = "0.1.0"
