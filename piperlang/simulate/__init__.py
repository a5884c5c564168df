"""Simulates an order of passes without devices."""
