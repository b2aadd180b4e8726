"""Values of options with several fields, such as vLLM's KVTransferConfig: read, checked, and without torch."""
