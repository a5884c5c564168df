"""Random legal schedules for a model, compared with the plain model: for whoever changes the compiler."""
