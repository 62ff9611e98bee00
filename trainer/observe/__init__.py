"""What people see of a step: metrics, token records, reports of non-finite values."""
