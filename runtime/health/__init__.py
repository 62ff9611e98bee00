"""What a service reports about itself over HTTP: `/health`, `/metrics`."""
