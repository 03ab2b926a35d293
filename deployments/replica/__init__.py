"""What every model replica is to Ray: its start, device, health, report, metrics and end."""
