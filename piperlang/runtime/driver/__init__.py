"""Runs a plan: on Ray workers, or on threads of this process."""
