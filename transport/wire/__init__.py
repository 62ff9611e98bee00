"""What goes over sockets and into files: samples, batches, manifests, messages, and their codec."""
