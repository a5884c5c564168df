"""Drawings of schedules."""
