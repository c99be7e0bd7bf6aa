"""The decode engine: knows token ids and tensors, never text, sockets or HTTP."""
