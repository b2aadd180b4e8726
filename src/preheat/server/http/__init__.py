"""HTTP: connections, bodies, streams and their limits, whatever the endpoint. No torch."""
