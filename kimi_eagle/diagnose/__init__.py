"""What this machine has and lacks: rows that say OK or not OK, and what to do. Native code is asked in child processes."""
