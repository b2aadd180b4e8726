"""The HTTP server: endpoints, their schemas, and the links to engines. No torch."""
