"""Clients of a server that speaks OpenAI: find it, chat, stream, ask in batches."""
