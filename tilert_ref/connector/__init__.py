"""KV handoff from vLLM prefill to the decode server.

Pure, no sockets and no vLLM: `layout`, `planes`, `rounding` (bytes), `codec`, `rid`, `admission` (protocol).
With I/O: `transport`, `receiver`, `sender`, and `prefill_connector`, the one file that imports vLLM.

This file imports nothing: the router needs `rid` only and must not load torch.
"""
