"""What an order of work would take, without devices."""
