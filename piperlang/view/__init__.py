"""Pictures of schedules."""
