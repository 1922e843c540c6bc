"""Proof that exported weights are the base plus what was trained: by bytes, by numbers, by logits, by a server."""
