"""What clients ask and engines do: requests, jobs, images, chat. No HTTP framework, no model library."""
