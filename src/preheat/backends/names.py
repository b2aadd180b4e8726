"""The names that ``--device`` takes beside ``auto``. Imports nothing, so that the settings can list them."""

HOST = "cpu"
DEVICES = (HOST, "cuda", "hpu")
