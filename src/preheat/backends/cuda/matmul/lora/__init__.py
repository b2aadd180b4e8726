"""The terms of adapters in linear layers and experts."""
