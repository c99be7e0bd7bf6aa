"""The decode server: receives a request's KV, hands it to the engine process, streams token ids back.

http       app.py             endpoints and replies, one ASGI response that owns the request's lease
pipeline   service.py         lease, validate, wait for KV, inject, decode, release
engine     engine_client.py   spawns, watches and restarts the engine process
           engine_process.py  the process: maps the receive buffer, runs one request at a time
"""
