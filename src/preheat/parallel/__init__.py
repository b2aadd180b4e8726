"""Several ranks that share each layer: their processes, what they are told, and when one of them dies."""
