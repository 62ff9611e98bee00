"""What every service process needs: start, log, watchdog, shutdown, children."""
