"""OpenAI's batches and their files."""
