"""From the graph to what each device does: instructions in streams, checked before anything starts. No torch here."""
