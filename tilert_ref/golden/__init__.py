"""Golden recordings: what real vLLM decodes, and our engine held against it.

record.py runs vLLM and records it; recording.py is what comes out, as a whole or as a small file to keep; replay.py
feeds our engine with a recording's KV and tokens; verify.py compares the two and prints the figures.
"""
