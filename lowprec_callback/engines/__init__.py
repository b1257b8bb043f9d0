"""What "run this model under this recipe" means."""
