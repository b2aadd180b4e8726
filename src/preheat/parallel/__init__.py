"""Several ranks that share each layer: their processes, messages, and the end when one dies."""
