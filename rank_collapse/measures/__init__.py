"""How far tokens are from rank one: norms, residuals, ranks, profiles by layer."""
