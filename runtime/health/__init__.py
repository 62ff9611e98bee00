"""What a service says about itself: `/health`, `/metrics`."""
