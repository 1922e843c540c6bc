"""Hugging Face checkpoint folders: fetched, checked from their headers, and read tensor by tensor."""
