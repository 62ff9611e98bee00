"""What survives a crash: state, history, ledger, saved rollouts."""
