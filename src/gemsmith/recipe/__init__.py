"""The recipe: its schema, loading, checks, and what each backend can do."""
