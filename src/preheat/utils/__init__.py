"""What has no other home."""
