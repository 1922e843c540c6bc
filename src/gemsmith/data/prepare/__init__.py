"""Public data sets, made into rows that a recipe reads."""
