"""How tests run programs, and how they check numbers, refusals, files and imports."""
