"""What may be said of two trainings side by side: their differences, and the ratios that those confound."""
