"""The fake of `habana_frameworks.torch.distributed`."""
