"""OpenAI's endpoints for chats, completions and responses, with vLLM's fields."""
