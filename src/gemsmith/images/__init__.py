"""Images: one rule that makes RGB of a file, and the patches and soft tokens that Gemma 4 makes of RGB."""
